"""A picture of the states of a node in the tree with tiers: the states and their changes are those of a real run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from benchmarks.m4_tiers.states import DISK, GONE, NEW, PLACES, TEXTS, WAYS, Change, changes
from benchmarks.plots import ON_PALE, SMALL, panels, save

COLORS = {"device": "#d7e5f3", "writing": "#e6e3f0", "both": "#cfe8cf", "loading": "#e6e3f0", "host": "#fbe3c0"}


def states(found: Sequence[Change]) -> Figure:
    """Draw each state, and an arrow for each change with the methods that make it."""
    figure, axis = panels(11.5, 4.3)
    methods: dict[tuple[str, str], list[str]] = {}
    for before, after, method in found:
        methods.setdefault((before, after), []).append(method)
    for (before, after), names in methods.items():
        _arrow(axis, before, after, " or ".join(sorted(names)))
    for state in dict.fromkeys(state for change in found for state in change[:2]):
        x, y = PLACES[state]
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "ls": "--" if state in (NEW, GONE, DISK) else "-"}
        axis.add_patch(FancyBboxPatch((x - 0.8, y - 0.28), 1.6, 0.56, fc=COLORS.get(state, "0.93"), zorder=2, **look))
        style = {"ha": "center", "color": ON_PALE if state in COLORS else "black", "zorder": 3}
        axis.text(x, y, state, va="center", fontsize=10, **style)
        above = state == "loading"
        axis.text(
            x, y + (0.38 if above else -0.38), TEXTS[state], ha="center", va="bottom" if above else "top", fontsize=7
        )
    axis.set(xlim=(-1, 14.7), ylim=(-2.9, 2.35))
    axis.axis("off")
    return figure


def _arrow(axis: Axes, before: str, after: str, label: str) -> None:
    """Draw the arrow of a change. Raises `KeyError` for a change that has no place in the picture yet."""
    begin, end, bend, place = WAYS[before, after]
    (x, y), (to_x, to_y) = PLACES[before], PLACES[after]
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "color": "0.25", "connectionstyle": f"arc3,rad={bend}"}
    ends = (x + begin[0], y + begin[1]), (to_x + end[0], to_y + end[1])
    axis.add_patch(FancyArrowPatch(*ends, shrinkA=1, shrinkB=1, **look))
    axis.text(*place, label, ha="center", va="center", **SMALL)


def draw_pictures(folder: Path) -> None:
    """Draw the picture into a folder."""
    save(states(changes()), folder / "m4_tier_states.svg")
