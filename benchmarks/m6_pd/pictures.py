"""A picture of the states of a transfer, drawn from `TRANSITIONS` itself."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from benchmarks.plots import ON_PALE, SMALL, panels, save
from m6_multimodal_pd.disaggregation.poll import TRANSITIONS, KVPoll

QUEUES = {
    KVPoll.BOOTSTRAPPING: ("in bootstrap_queue", "in prealloc_queue"),
    KVPoll.WAITING_FOR_INPUT: ("waits, is computed", "in transfer_queue"),
    KVPoll.TRANSFERRING: ("is computed, in inflight_queue", "in transfer_queue"),
    KVPoll.SUCCESS: ("ends", "runs"),
    KVPoll.FAILED: ("ends", "ends"),
}
"""Where a request is meanwhile, on the prefill side and on the decode side."""


def states() -> Figure:
    """Draw each state of a transfer, its transitions, and where the request is meanwhile on both sides."""
    figure, axis = panels(10, 3.6)
    places = {state: (2.6 * place, 1.0) for place, state in enumerate(sorted(TRANSITIONS)[1:])}
    places[KVPoll.FAILED] = (3.9, -0.75)
    for state, targets in TRANSITIONS.items():
        for target in targets:
            _way(axis, places[state], places[target], is_failure=target is KVPoll.FAILED)
    for state, (x, y) in places.items():
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "linewidth": 2.2 if state.is_final else 1}
        color = {KVPoll.FAILED: "#f6c9c4", KVPoll.SUCCESS: "#cfe8cf"}.get(state, "#d7e5f3")
        axis.add_patch(FancyBboxPatch((x - 0.85, y - 0.28), 1.7, 0.56, fc=color, ec="0.3", zorder=2, **look))
        name = state.name.replace("_", " ").capitalize()
        axis.text(x, y, name, color=ON_PALE, ha="center", va="center", fontsize=10, zorder=3)
        text = "\n".join(f"{side}: {queue}" for side, queue in zip(("prefill", "decode"), QUEUES[state], strict=True))
        below = state is KVPoll.FAILED
        axis.text(x, y - 0.36 if below else y + 0.36, text, ha="center", va="top" if below else "bottom", **SMALL)
    axis.set(xlim=(-1.3, 9.1), ylim=(-1.65, 2.0))
    axis.axis("off")
    return figure


def _way(axis: Axes, begin: tuple[float, float], end: tuple[float, float], *, is_failure: bool) -> None:
    """Draw an arrow from the edge of one box to the edge of another; one that skips a state goes below it."""
    if is_failure:
        begin, end, bend = (begin[0], begin[1] - 0.28), (end[0] + 0.18 * (begin[0] - end[0]), end[1] + 0.28), 0.0
    elif end[0] - begin[0] > 3:
        begin, end, bend = (begin[0] + 0.6, begin[1] - 0.28), (end[0] - 0.6, end[1] - 0.28), 0.25
    else:
        begin, end, bend = (begin[0] + 0.87, begin[1]), (end[0] - 0.87, end[1]), 0.0
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "shrinkA": 1, "shrinkB": 1}
    color = "C3" if is_failure else "0.25"
    axis.add_patch(FancyArrowPatch(begin, end, connectionstyle=f"arc3,rad={bend}", color=color, **look))


def draw_pictures(folder: Path) -> None:
    """Draw the picture into a folder."""
    save(states(), folder / "m6_pd_states.svg")
