"""The plots of lesson 3."""

from matplotlib.figure import Figure

from benchmarks.plots import Row, named_bars, panels, roof

COLORS = {"transformers": "0.6", "m2": "C1", "m3": "C0"}
KINDS = {"prefill": ("o", "C1", "prefill of so many tokens"), "decode": ("s", "C0", "decode of so many requests")}
TITLES = (
    "One stream, 0.6B shape",
    "One stream with text, embedded",
    "Ragged batch of 16, 0.6B shape",
    "Ragged batch of 64, embedded",
)


def throughput(*parts: Row) -> Figure:
    """Draw tokens per second of all sides, a panel for each part."""
    figure, axes = panels(9, 5.6, 2, 2)
    for axis, part, title in zip(axes.flat, parts, TITLES, strict=True):
        sides = part["sides"]
        speeds = [side["tokens_per_second"] for side in sides.values()]
        times = [side["times_transformers"] for side in sides.values()]  # of the rounds, as in the table
        labels = [f"{speed:,.4g}  ({ratio:.1f}x)" for speed, ratio in zip(speeds, times, strict=True)]
        named_bars(axis, list(sides), speeds, [color_of(side) for side in sides], labels)
        axis.set(title=title, xlabel="output tokens per second")
    return figure


def color_of(side: str) -> tuple[str, float]:
    """Return color and strength of a side: m3 is paler on the reference backend."""
    return COLORS[side.split(",")[0].split()[0]], 0.5 if "on torch" in side else 1


def fragmentation(part: Row) -> Figure:
    """Draw reserved and held tokens, step by step, on one scale: m2's slots and m3's blocks for the same requests."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=[1, 1, 0.9])
    left = figure.add_subplot(grid[0])
    middle, right = figure.add_subplot(grid[1], sharex=left, sharey=left), figure.add_subplot(grid[2])
    layouts = part["layouts"]
    for axis, name in ((left, "slots"), (middle, "blocks of 16")):
        steps = layouts[name]["per_step"]
        for key, style in {"reserved": {"color": "C3", "alpha": 0.35}, "held": {"color": "C2"}}.items():
            axis.fill_between(range(1, len(steps) + 1), [step[key] / 1e3 for step in steps], label=key, **style)
        axis.set(xlabel="step", ylim=(0, None))
        axis.set_title(f"{layouts[name]['layout']}\n{layouts[name]['unused']:.1%} reserved for nothing", fontsize=10)
    left.set_ylabel("thousand tokens")
    middle.tick_params(labelleft=False)
    middle.legend(fontsize=8, loc="upper right")
    shares = [100 * layout["unused"] for layout in layouts.values()]
    colors = [COLORS["m2" if "slots" in name else "m3"] for name in layouts]
    names = [layout["layout"] for layout in layouts.values()]
    named_bars(right, names, shares, colors, [f"{share:.1f} %" for share in shares])
    right.set(xlabel="% of the reserved, over all steps", xlim=(0, 115), xticks=range(0, 101, 25))
    right.set_title("Reserved for nothing", fontsize=10)
    return figure


def roofline(random: Row, embedded: Row) -> Figure:
    """Draw the roof of the machine in each precision, and prefills and decodes below it, on one scale."""
    figure, axes = panels(9, 4.4, 1, 2, sharex=True, sharey=True)
    for axis, part, title in zip(axes, (random, embedded), ("0.6B, bfloat16", "embedded, float32"), strict=True):
        roof(axis, part, KINDS)
        axis.set_title(title)
    axes[1].set_ylabel("")
    return figure


def sharing(part: Row) -> Figure:
    """Draw blocks in use, step by step: four continuations of one prompt, forked and as requests of their own."""
    figure, axes = panels(9, 3.2, 1, 2, sharey=True)
    titles = {"separate": f"{part['continuations']} requests", "forked": f"One request, n = {part['continuations']}"}
    for axis, (way, title) in zip(axes, titles.items(), strict=True):
        steps = part["ways"][way]["per_step"]
        shared, own = [s["shared"] for s in steps], [s["used"] - s["shared"] for s in steps]
        numbers = range(1, len(steps) + 1)
        axis.stackplot(numbers, shared, own, labels=["shared", "of one request"], colors=["C2", "C0"])
        axis.set(xlabel="step", title=f"{title}: {part['ways'][way]['prefill_tokens']:,} tokens prefilled")
    axes[0].set_ylabel("blocks in use")
    axes[1].legend(loc="upper right")
    return figure


def preemption(part: Row) -> Figure:
    """Draw speed and moved tokens in a pool with room for all, and in one that is too small."""
    figure, (left, right) = panels(9, 3.2, 1, 2)
    sides = part["sides"]
    blocks = {name: part["peak_blocks"] if name == "room for all" else part["pool_blocks"] for name in sides}
    names = [f"{name}\n{number:,} blocks" for name, number in blocks.items()]
    bars = left.bar(names, [side["tokens_per_second"] for side in sides.values()], color="C0", width=0.6)
    left.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    left.set(ylabel="output tokens per second", title="Speed")
    left.margins(y=0.12)
    again, swapped = ([side[key] / 1e3 for side in sides.values()] for key in ("tokens_again", "tokens_swapped"))
    counts = [f"{name}\n{side['preemptions']:,} preemptions" for name, side in sides.items()]
    right.bar(counts, again, color="C3", width=0.6, label="computed again")
    right.bar(counts, swapped, bottom=again, color="C1", width=0.6, label="swapped out")
    right.set(ylabel="thousand tokens", title="KV that was lost or moved")
    right.set_ylim(top=1.4 * max(map(sum, zip(again, swapped, strict=True))))  # room for the legend
    right.legend(loc="upper left", fontsize=8)
    return figure


PLOTS = {
    "m3_throughput": ("single_0_6b single_embedded ragged_0_6b ragged_embedded", throughput),
    "m3_fragmentation": ("fragmentation_64", fragmentation),
    "m3_roofline": ("roofline_0_6b roofline_embedded", roofline),
    "m3_sharing": ("parallel_sampling", sharing),
    "m3_preemption": ("preemption", preemption),
}
