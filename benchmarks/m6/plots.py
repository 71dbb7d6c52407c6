"""The plots of lesson 6, part 1."""

from matplotlib.figure import Figure

from benchmarks.m6.answers import COLD
from benchmarks.plots import SMALL, Row, bare, gap_panels, lines, panels, ticks

PARTS = {
    "patches": ("C1", "pixels to patches"),
    "tower": ("C4", "vision tower"),
    "model": ("C0", "model"),
    "rest": ("0.75", "the rest"),
}


def answers(part: Row) -> Figure:
    """Draw the parts of the time to the first token, for each case."""
    figure, axis = panels(10, 2.9)
    cases = part["cases"]
    left = [0.0] * len(cases)
    for key, (color, label) in PARTS.items():
        widths = [1e3 * row[key] for row in cases.values()]
        axis.barh(range(len(cases)), widths, 0.62, left, color=color, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, row in enumerate(cases.values()):
        text = f"{row['computed_tokens']} of {row['prompt_tokens']} tokens, tower runs: {row['encoder_runs']}"
        axis.text(left[place] + 0.008 * max(left), place, text, va="center", **SMALL)
    axis.set_yticks(range(len(cases)), ["the picture is new" if name == COLD else name for name in cases])
    axis.set(xlabel="ms to the first token", xlim=(0, 1.38 * max(left)), ylim=(len(cases) - 0.5, -0.5))
    bare(axis)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=4, **SMALL)
    return figure


def tower(part: Row) -> Figure:
    """Draw the cost of a picture by the number of pictures that share a pass."""
    figure, axes = panels(10, 3.2, 1, len(part["sizes"]))
    for axis, (name, found) in zip(axes, part["sizes"].items(), strict=True):
        numbers = [row["number"] for row in found["numbers"]]
        sides = ("one by one", "in one pass")
        each = {side: [1e3 * row[side] / row["number"] for row in found["numbers"]] for side in sides}
        lines(axis, numbers, each, ("0.5", "C4"), xlabel="pictures", ylabel="ms for each", ylim=(0, None))
        axis.set_xscale("log", base=2)
        ticks(axis, numbers)
        axis.set_title(f"{name} pixels, {found['tokens']} tokens", fontsize=10)
    axes[0].legend(**SMALL)
    return figure


def gaps(part: Row) -> Figure:
    """Draw gaps, throughput, and the waiting time of prompts, by the encoder's budget."""
    figure, axes = gap_panels(list(part["budgets"].values()), range(len(part["budgets"])))
    for axis in axes:
        ticks(axis, range(len(part["budgets"])), [name.replace(" tokens", "") for name in part["budgets"]])
        axis.set_xlabel("encoded tokens a step, at most")
    return figure


PLOTS = {f"m6_{draw.__name__}": (draw.__name__, draw) for draw in (answers, tower, gaps)}
