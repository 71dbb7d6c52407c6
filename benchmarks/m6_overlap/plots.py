"""The plot of lesson 6, part 3: decode steps in normal order and overlapped."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import Row
from benchmarks.m6_overlap.measures import BOTH_CORES, NORMAL, OVERLAPPED
from benchmarks.plots import SMALL, grouped_bars, panels

WAYS = {NORMAL: "0.7", BOTH_CORES: "0.45", OVERLAPPED: "C0"}
"""Colors, in the order of the bars."""


def steps(embedded: Row, random: Row) -> Figure:
    """Draw a decode step of each way, as a part of the one in normal order with one thread."""
    figure, axes = panels(10, 3.6, 1, 2, sharey=True)
    titles = ("the embedded checkpoint", "the 0.6B shape")
    for axis, part, title in zip(axes, (embedded, random), titles, strict=True):
        beside(axis, part)
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("a decode step, of normal with 1 thread")
    axes[0].set_ylim(0, 1.4)
    axes[0].legend(**SMALL, loc="upper left", ncols=2, frameon=False)
    return figure


def beside(axis: Axes, part: Row) -> None:
    """Draw the ways side by side, and across the last one the time of the device alone, which overlapping can reach."""
    rows = part["rows"]
    base = [row["sides"][NORMAL] for row in rows]
    own = {way: [row["sides"][way] / one for row, one in zip(rows, base, strict=True)] for way in WAYS}
    grouped_bars(axis, [f"{row['requests']} at once" for row in rows], own, list(WAYS.values()), "%.2f")
    for place, (row, one) in enumerate(zip(rows, base, strict=True)):
        label = None if place else "the device alone"
        axis.plot([place + 0.13, place + 0.4], [row["device"] / one] * 2, color="C3", lw=2, label=label)


PLOTS = {"m6_overlap_steps": ("embedded random_0_6b", steps)}
