"""The plots of milestone 6, drawn from the numbers that `benchmarks.m6_multimodal` has measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import ASSETS
from benchmarks.m6_answers import COLD, PARTS

Part = dict[str, Any]
COLORS = {"patches": "C8", "tower": "C4", "model": "C0", "rest": "0.75"}
LABELS = {"patches": "pixels to patches", "tower": "vision tower", "model": "model", "rest": "the rest"}
SMALL: Part = {"fontsize": 8}


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw those whose parts are there into the docs' assets."""
    plots: dict[str, tuple[Callable[[Part], Figure], str]] = {
        "m6_answers": (answers, "answers"),
        "m6_tower": (tower, "tower"),
        "m6_gaps": (gaps, "gaps"),
    }
    for name, (draw, needed) in plots.items():
        if needed in parts:
            draw(parts[needed]).savefig(folder / f"{name}.png", dpi=110)


def answers(part: Part) -> Figure:
    """Where the time to the first token goes, for each of the four."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axis = figure.subplots()
    names = list(part["cases"])
    left = [0.0] * len(names)
    for key in PARTS:
        widths = [1e3 * part["cases"][name][key] for name in names]
        axis.barh(range(len(names)), widths, 0.62, left, color=COLORS[key], label=LABELS[key])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, name in enumerate(names):
        row = part["cases"][name]
        text = f"{row['computed_tokens']} of {row['prompt_tokens']} tokens, tower runs: {row['encoder_runs']}"
        axis.text(left[place] + 0.008 * max(left), place, text, va="center", **SMALL)
    axis.set_yticks(range(len(names)), ["the picture is new" if name == COLD else name for name in names])
    axis.set(xlabel="ms to the first token", xlim=(0, 1.38 * max(left)), ylim=(len(names) - 0.5, -0.5))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=4, **SMALL)
    return figure


def tower(part: Part) -> Figure:
    """What a picture costs by how many share a pass."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, len(part["sizes"]))
    for axis, (name, found) in zip(axes, part["sizes"].items(), strict=True):
        numbers = [row["number"] for row in found["numbers"]]
        for side, color in (("one by one", "0.5"), ("in one pass", "C4")):
            each = [1e3 * row[side] / row["number"] for row in found["numbers"]]
            axis.plot(numbers, each, "o-", ms=4, color=color, label=side)
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, map(str, numbers))
        axis.minorticks_off()
        axis.set(xlabel="pictures", ylabel="ms for each", ylim=(0, None))
        axis.set_title(f"{name} pixels, {found['tokens']} tokens", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(**SMALL)
    return figure


def gaps(part: Part) -> Figure:
    """Gaps, throughput, and how long the prompts wait, by the encoder's budget."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    gap, speed, wait = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    names, rows = [name.replace(" tokens", "") for name in part["budgets"]], list(part["budgets"].values())
    places = range(len(names))
    for key, (color, label) in {
        "longest": ("C3", "longest"),
        "p95": ("C1", "p95"),
        "p50": ("C0", "median"),
    }.items():
        gap.plot(places, [1e3 * row[key] for row in rows], "o-", ms=4, color=color, label=label)
    gap.set(ylabel="gap between tokens of a stream, ms", ylim=(0, None))
    gap.legend(**SMALL)
    speed.plot(places, [row["tokens_per_second"] for row in rows], "o-", ms=4, color="C0")
    speed.set(ylabel="tokens/s, of prompts and answers", ylim=(0, None))
    wait.plot(places, [1e3 * row["mean_ttft"] for row in rows], "o-", ms=4, color="C2")
    wait.set(ylabel="mean time to a prompt's first token, ms", ylim=(0, None))
    for axis in (gap, speed, wait):
        axis.set_xticks(places, names)
        axis.set_xlabel("encoded tokens a step, at most")
        axis.tick_params(labelsize=8)
        axis.grid(color="0.94")
        axis.spines[["top", "right"]].set_visible(False)
    return figure
