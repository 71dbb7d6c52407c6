"""The plots of milestone 3, drawn from the numbers that `benchmarks.m3_paged_attention` has measured."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import ASSETS

Part = dict[str, Any]
COLORS = {"transformers": "0.6", "m2": "C1", "m3": "C0"}


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw all of them into the docs' assets."""
    drawn = {
        "m3_throughput": throughput(parts),
        "m3_fragmentation": fragmentation(parts["fragmentation_64"]),
        "m3_roofline": roofline({"0.6B, bfloat16": parts["roofline_0_6b"], "embedded": parts["roofline_embedded"]}),
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
        bars = axis.barh(range(len(sides)), speeds, color=[COLORS[side.split(",")[0].split()[0]] for side in sides])
        labels = [f"{speed:,.4g}  ({speed / speeds[0]:.1f}x)" for speed in speeds]
        axis.bar_label(bars, labels, fontsize=8, padding=3)
        axis.set_yticks(range(len(sides)), list(sides), fontsize=8)
        axis.invert_yaxis()
        axis.set(title=title, xlabel="output tokens per second")
        axis.set_xlim(right=1.45 * max(speeds))  # room for the labels
    return figure


def fragmentation(part: Part) -> Figure:
    """What is reserved and what is held, step by step: m2's slots and m3's blocks for the same burst."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    layouts = part["layouts"]
    for axis, name in ((left, "slots"), (middle, "blocks of 16")):
        layout = layouts[name]
        steps = layout["per_step"]
        numbers = range(1, len(steps) + 1)
        axis.fill_between(numbers, [s["reserved"] / 1e3 for s in steps], color="C3", alpha=0.35, label="reserved")
        axis.fill_between(numbers, [s["held"] / 1e3 for s in steps], color="C2", label="held")
        axis.set(xlabel="step", ylabel="thousand tokens", ylim=(0, None))
        axis.set_title(f"{layout['layout']}\n{layout['unused']:.1%} for nothing", fontsize=10)
        axis.legend(fontsize=8)
    names = list(layouts)
    shares = [100 * layouts[name]["unused"] for name in names]
    bars = right.barh(range(len(names)), shares, color=["C1" if "slots" in name else "C0" for name in names])
    right.bar_label(bars, fmt="{:.1f} %", fontsize=8, padding=3)
    right.set_yticks(range(len(names)), [layouts[name]["layout"] for name in names], fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="% reserved, not held", xlim=(0, 125))
    right.set_title("On average over the steps", fontsize=10)
    return figure


def roofline(roofs: dict[str, Part]) -> Figure:
    """The roof of the machine in each precision, and where prefills and decodes lie."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axis, (title, roof) in zip(figure.subplots(1, 2), roofs.items(), strict=True):
        intensities = [0.2, roof["ridge"], max(1000, 3 * roof["ridge"])]
        axis.plot(
            intensities, [min(roof["flops"], x * roof["bandwidth"]) / 1e9 for x in intensities], "k-", linewidth=1
        )
        for kind, mark, color in (("prefill", "o", "C1"), ("decode", "s", "C0")):
            points = [point for point in roof["points"] if point["kind"] == kind]
            speeds = [point["flops"] / 1e9 for point in points]
            axis.plot([point["intensity"] for point in points], speeds, mark, color=color, label=kind)
            unit = "tok" if kind == "prefill" else "req"
            for point, speed in zip(points, speeds, strict=True):
                place = (point["intensity"], speed)
                below = -12 if kind == "prefill" else 5
                text = f"{point['tokens']} {unit}"
                axis.annotate(text, place, fontsize=7, xytext=(0, below), textcoords="offset points", ha="center")
        axis.axvline(roof["ridge"], color="0.8", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s", title=title)
        axis.legend(loc="lower right")
    return figure


def sharing(part: Part) -> Figure:
    """Blocks in use, step by step: four continuations of one prompt, forked and as requests of their own."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"separate": f"{part['continuations']} requests", "forked": f"One request, n = {part['continuations']}"}
    for axis, (way, title) in zip(axes, titles.items(), strict=True):
        steps = part["ways"][way]["per_step"]
        numbers = range(1, len(steps) + 1)
        shared, own = [s["shared"] for s in steps], [s["used"] - s["shared"] for s in steps]
        axis.stackplot(numbers, shared, own, labels=["shared", "of one holder"], colors=["C2", "C0"])
        tokens = part["ways"][way]["prefill_tokens"]
        axis.set(xlabel="step", title=f"{title}: {tokens:,} tokens prefilled")
    axes[0].set_ylabel("blocks in use")
    axes[1].legend(loc="upper right")
    return figure


def preemption(part: Part) -> Figure:
    """What it costs to run in a pool that is too small."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    sides = part["sides"]
    names = list(sides)
    bars = left.bar(names, [sides[name]["tokens_per_second"] for name in names], color="C0", width=0.6)
    left.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    left.set(ylabel="output tokens per second", title=f"{part['peak_blocks']:,} blocks, or {part['pool_blocks']:,}")
    again = [sides[name]["tokens_again"] / 1e3 for name in names]
    swapped = [sides[name]["tokens_swapped"] / 1e3 for name in names]
    right.bar(names, again, color="C3", width=0.6, label="computed again")
    bars = right.bar(names, swapped, bottom=again, color="C1", width=0.6, label="swapped out")
    right.bar_label(bars, [f"{sides[name]['preemptions']} preemptions" for name in names], fontsize=8)
    right.set(ylabel="thousand tokens", title="KV that was lost or moved")
    right.set_ylim(0, 1.3 * max(1e-3, *map(sum, zip(again, swapped, strict=True))))
    right.legend(loc="upper left")
    left.margins(y=0.12)
    return figure
