"""The plots of milestone 3, drawn from the numbers that `benchmarks.m3_paged_attention` has measured."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import ASSETS

Part = dict[str, Any]
COLORS = {"transformers": "0.6", "m2": "C1", "m3": "C0"}
KINDS = (("prefill", "o", "C1", "tokens"), ("decode", "s", "C0", "requests"))
"""Of the points under a roof: mark, colour, and what their number counts."""


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw all of them into the docs' assets."""
    drawn = {
        "m3_throughput": throughput(parts),
        "m3_fragmentation": fragmentation(parts["fragmentation_64"]),
        "m3_roofline": roofline(
            {"0.6B, bfloat16": parts["roofline_0_6b"], "embedded, float32": parts["roofline_embedded"]}
        ),
        "m3_sharing": sharing(parts["parallel_sampling"]),
        "m3_preemption": preemption(parts["preemption"]),
    }
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=110)


def throughput(parts: dict[str, Part]) -> Figure:
    """Tokens per second of all sides, a panel for each piece of work."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    titles = {
        "single_0_6b": "One stream, 0.6B shape",
        "single_embedded": "One stream with text, embedded",
        "ragged_0_6b": "Ragged batch of 16, 0.6B shape",
        "ragged_embedded": "Ragged batch of 64, embedded",
    }
    for axis, (name, title) in zip(figure.subplots(2, 2).flat, titles.items(), strict=True):
        sides = parts[name]["sides"]
        speeds = [side["tokens_per_second"] for side in sides.values()]
        bars = axis.barh(range(len(sides)), speeds, color=[color_of(side) for side in sides])
        labels = [f"{speed:,.4g}  ({speed / speeds[0]:.1f}x)" for speed in speeds]
        axis.bar_label(bars, labels, fontsize=8, padding=3)
        axis.set_yticks(range(len(sides)), list(sides), fontsize=8)
        axis.invert_yaxis()
        axis.set(title=title, xlabel="output tokens per second")
        axis.set_xlim(right=1.45 * max(speeds))  # room for the labels
    return figure


def color_of(side: str) -> tuple[str, float]:
    """Colour and strength: m3 is paler where it runs on the reference backend."""
    return COLORS[side.split(",")[0].split()[0]], 0.5 if "on torch" in side else 1


def fragmentation(part: Part) -> Figure:
    """What is reserved and what is held, step by step, on one scale: m2's slots and m3's blocks for the same burst."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    grid = figure.add_gridspec(1, 3, width_ratios=[1, 1, 0.9])
    left = figure.add_subplot(grid[0])
    middle = figure.add_subplot(grid[1], sharex=left, sharey=left)
    right = figure.add_subplot(grid[2])
    layouts = part["layouts"]
    for axis, name in ((left, "slots"), (middle, "blocks of 16")):
        layout = layouts[name]
        steps = layout["per_step"]
        numbers = range(1, len(steps) + 1)
        axis.fill_between(numbers, [s["reserved"] / 1e3 for s in steps], color="C3", alpha=0.35, label="reserved")
        axis.fill_between(numbers, [s["held"] / 1e3 for s in steps], color="C2", label="held")
        axis.set(xlabel="step", ylim=(0, None))
        axis.set_title(f"{layout['layout']}\n{layout['unused']:.1%} reserved for nothing", fontsize=10)
    left.set_ylabel("thousand tokens")
    middle.tick_params(labelleft=False)
    middle.legend(fontsize=8, loc="upper right")
    names = list(layouts)
    shares = [100 * layouts[name]["unused"] for name in names]
    bars = right.barh(range(len(names)), shares, color=[COLORS["m2" if "slots" in name else "m3"] for name in names])
    right.bar_label(bars, fmt="{:.1f} %", fontsize=8, padding=3)
    right.set_yticks(range(len(names)), [layouts[name]["layout"] for name in names], fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="% of the reserved, over all steps", xlim=(0, 115), xticks=range(0, 101, 25))
    right.set_title("Reserved for nothing", fontsize=10)
    return figure


def roofline(roofs: dict[str, Part]) -> Figure:
    """The roof of the machine in each precision, and where prefills and decodes lie, on one scale."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, roof) in zip(axes, roofs.items(), strict=True):
        ridge, flops, bandwidth = roof["ridge"], roof["flops"], roof["bandwidth"]
        ends = [0.25, ridge, max(1000, 3 * ridge)]
        axis.plot(ends, [min(flops, x * bandwidth) / 1e9 for x in ends], "k-", linewidth=1)
        axis.axvline(ridge, color="0.85", linewidth=1, zorder=0)
        note = {"textcoords": "offset points", "fontsize": 8, "color": "0.35"}
        axis.annotate(f"{flops / 1e9:,.0f} GFLOP/s", (ends[2], flops / 1e9), (0, 4), ha="right", **note)
        middle = 0.8 * ridge**0.5  # of the slope, a little to the left of it
        slope = (middle, middle * bandwidth / 1e9)
        axis.annotate(f"{bandwidth / 1e9:.0f} GB/s", slope, (-6, 4), ha="right", **note)
        for kind, mark, color, unit in KINDS:
            points = [point for point in roof["points"] if point["kind"] == kind]
            places = [(point["intensity"], point["flops"] / 1e9) for point in points]
            axis.plot(*zip(*places, strict=True), mark, color=color, label=f"{kind} of so many {unit}")
        axis.set(xscale="log", yscale="log", xlabel="operations per byte", title=title)
        axis.margins(y=0.12)
    axes[0].set_ylabel("GFLOP/s")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.draw_without_rendering()  # from here on it is known where the points lie
    for axis, roof in zip(axes, roofs.values(), strict=True):
        number_points(axis, roof["points"], 72 / figure.dpi)
    return figure


def number_points(axis: Axes, points: list[Part], scale: float) -> None:
    """Write the size of each prefill and decode beside its mark, where it covers neither a mark nor another number.

    `scale` makes points, in which offsets and text are measured, of pixels.
    """
    colors = {kind: color for kind, _, color, _ in KINDS}
    places = [(point["intensity"], point["flops"] / 1e9) for point in points]
    spots = [(scale * x, scale * y) for x, y in axis.transData.transform(places)]
    taken = [*spots]
    for point, place, (x, y) in zip(points, places, spots, strict=True):
        offsets = [(dx, dy) for dy in (-12, 12, 0) for dx in (0, 14, -14) if dx or dy]
        free = [(dx, dy) for dx, dy in offsets if all(abs(x + dx - a) > 15 or abs(y + dy - b) > 9 for a, b in taken)]
        dx, dy = free[0] if free else offsets[0]
        taken.append((x + dx, y + dy))
        axis.annotate(
            str(point["tokens"]),
            place,
            (dx, dy),
            textcoords="offset points",
            fontsize=8,
            color=colors[point["kind"]],
            ha="center",
            va="center",
        )


def sharing(part: Part) -> Figure:
    """Blocks in use, step by step: four continuations of one prompt, forked and as requests of their own."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"separate": f"{part['continuations']} requests", "forked": f"One request, n = {part['continuations']}"}
    for axis, (way, title) in zip(axes, titles.items(), strict=True):
        steps = part["ways"][way]["per_step"]
        numbers = range(1, len(steps) + 1)
        shared, own = [s["shared"] for s in steps], [s["used"] - s["shared"] for s in steps]
        axis.stackplot(numbers, shared, own, labels=["shared", "of one request"], colors=["C2", "C0"])
        tokens = part["ways"][way]["prefill_tokens"]
        axis.set(xlabel="step", title=f"{title}: {tokens:,} tokens prefilled")
    axes[0].set_ylabel("blocks in use")
    axes[1].legend(loc="upper right")
    return figure


def preemption(part: Part) -> Figure:
    """What it costs to run in a pool that is too small."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    sides = part["sides"]
    names = list(sides)
    blocks = [part["peak_blocks"] if name == "room for all" else part["pool_blocks"] for name in names]
    bars = left.bar(names, [sides[name]["tokens_per_second"] for name in names], color="C0", width=0.6)
    left.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    left.set_xticks(range(len(names)), [f"{name}\n{num:,} blocks" for name, num in zip(names, blocks, strict=True)])
    left.set(ylabel="output tokens per second", title="Speed")
    left.margins(y=0.12)
    again = [sides[name]["tokens_again"] / 1e3 for name in names]
    swapped = [sides[name]["tokens_swapped"] / 1e3 for name in names]
    right.bar(names, again, color="C3", width=0.6, label="computed again")
    right.bar(names, swapped, bottom=again, color="C1", width=0.6, label="swapped out")
    counts = [f"{name}\n{sides[name]['preemptions']:,} preemptions" for name in names]
    right.set_xticks(range(len(names)), counts)
    right.set(ylabel="thousand tokens", title="KV that was lost or moved")
    right.set_ylim(0, 1.15 * max(1e-3, *map(sum, zip(again, swapped, strict=True))))
    right.legend(loc="upper left", fontsize=8)
    return figure
