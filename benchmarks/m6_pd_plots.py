"""The plots of prefill and decode apart, drawn from what `benchmarks.m6_pd` has measured, and the machine of states.

The latter is drawn from `TRANSITIONS` itself; `DOES` below has the words for each state.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from benchmarks import ASSETS
from m6_multimodal_pd.disaggregation.poll import TRANSITIONS, KVPoll

Part = dict[str, Any]
SMALL: Part = {"fontsize": 8}
KINDS = {
    "prefill": ("o", "C1", "a prompt of so many tokens"),
    "decode": ("s", "C0", "so many requests decode"),
    "both": ("D", "C3", "both in one step"),
}
"""Of the points under the roof: mark, colour, and what their number counts."""
BEST, GROUP, TWO = "one engine, 1 thread", "prefill + decode, 1 thread each", "one engine, 2 threads"
COLORS = {BEST: "C1", TWO: "0.7", GROUP: "C0"}
DOES = {
    KVPoll.BOOTSTRAPPING: ("in bootstrap_queue", "in prealloc_queue"),
    KVPoll.WAITING_FOR_INPUT: ("waits, is computed", "in transfer_queue"),
    KVPoll.TRANSFERRING: ("is computed, in inflight_queue", "in transfer_queue"),
    KVPoll.SUCCESS: ("ends", "runs"),
    KVPoll.FAILED: ("ends", "ends"),
}
"""Where a request is meanwhile, on the prefill side and on the decode side."""


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw those whose parts are there into the docs' assets, and the states."""
    plots: dict[str, tuple[Callable[[Part], Figure], str]] = {
        "m6_pd_roofline": (roofline, "roofline"),
        "m6_pd_gaps": (gaps, "gaps"),
        "m6_pd_overhead": (overhead, "overhead"),
    }
    for name, (draw, needed) in plots.items():
        if needed in parts:
            draw(parts[needed]).savefig(folder / f"{name}.png", dpi=110)
    states().savefig(folder / "m6_pd_states.png", dpi=110)


def states() -> Figure:
    """Each state of a transfer, where it may go, and where the request is meanwhile on both sides."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axis = figure.subplots()
    places = {state: (2.6 * place, 1.0) for place, state in enumerate(sorted(TRANSITIONS)[1:])}
    places[KVPoll.FAILED] = (3.9, -0.75)
    for state, targets in TRANSITIONS.items():
        for target in targets:
            _way(axis, places[state], places[target], is_failure=target is KVPoll.FAILED)
    for state, (x, y) in places.items():
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "linewidth": 2.2 if state.is_final else 1}
        color = {KVPoll.FAILED: "#f6c9c4", KVPoll.SUCCESS: "#cfe8cf"}.get(state, "#d7e5f3")
        axis.add_patch(FancyBboxPatch((x - 0.85, y - 0.28), 1.7, 0.56, fc=color, ec="0.3", zorder=2, **look))
        axis.text(x, y, state.name.replace("_", " ").capitalize(), ha="center", va="center", fontsize=10, zorder=3)
        said = "\n".join(f"{side}: {does}" for side, does in zip(("prefill", "decode"), DOES[state], strict=True))
        below = state is KVPoll.FAILED
        axis.text(x, y - 0.36 if below else y + 0.36, said, ha="center", va="top" if below else "bottom", **SMALL)
    axis.set(xlim=(-1.3, 9.1), ylim=(-1.65, 2.0))
    axis.axis("off")
    return figure


def _way(axis: Axes, begin: tuple[float, float], end: tuple[float, float], *, is_failure: bool) -> None:
    """An arrow from the edge of one box to the edge of another; one that skips a state goes below it."""
    if is_failure:
        begin, end, bend = (begin[0], begin[1] - 0.28), (end[0] + 0.18 * (begin[0] - end[0]), end[1] + 0.28), 0.0
    elif end[0] - begin[0] > 3:
        begin, end, bend = (begin[0] + 0.6, begin[1] - 0.28), (end[0] - 0.6, end[1] - 0.28), 0.25
    else:
        begin, end, bend = (begin[0] + 0.87, begin[1]), (end[0] - 0.87, end[1]), 0.0
    color = "C3" if is_failure else "0.25"
    axis.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle="-|>",
            connectionstyle=f"arc3,rad={bend}",
            mutation_scale=12,
            color=color,
            shrinkA=1,
            shrinkB=1,
        )
    )


def roofline(part: Part) -> Figure:
    """Where steps lie below the roof; and what a step takes, alone and with both in it."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    ridge, flops, bandwidth = part["ridge"], part["flops"], part["bandwidth"]
    ends = [0.6, ridge, 900]
    left.plot(ends, [min(flops, x * bandwidth) / 1e9 for x in ends], "k-", lw=1)
    left.axvline(ridge, color="0.85", lw=1, zorder=0)
    note: Part = {"textcoords": "offset points", "color": "0.35"} | SMALL
    left.annotate(f"{flops / 1e9:,.0f} GFLOP/s", (900, flops / 1e9), (0, 4), ha="right", **note)
    left.annotate(f"{bandwidth / 1e9:.0f} GB/s", (1.6, 1.6 * bandwidth / 1e9), (-6, 4), ha="right", **note)
    for kind, (mark, color, label) in KINDS.items():
        points = [point for point in part["points"] if point["kind"] == kind]
        left.plot([p["intensity"] for p in points], [p["flops"] / 1e9 for p in points], mark, color=color, label=label)
        for p in points:
            place, look = (p["intensity"], p["flops"] / 1e9), {"textcoords": "offset points", "color": color} | SMALL
            if kind == "both":
                left.annotate(f"{p['decodes']} + {p['tokens']}", place, (7, 2), va="bottom", **look)
            else:
                left.annotate(str(p["tokens"]), place, (0, -6), ha="center", va="top", **look)
    left.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s")
    left.margins(y=0.12)
    left.set_yticks([20, 50, 100, 200], ["20", "50", "100", "200"])
    left.minorticks_off()
    left.legend(loc="lower right", **SMALL)
    (both,) = (p for p in part["points"] if p["kind"] == "both")
    bars = {
        f"{both['decodes']} decode": _seconds(part, "decode", both["decodes"]),
        f"a prompt of {both['tokens']}": _seconds(part, "prefill", both["tokens"]),
        "both in one step": both["seconds"],
    }
    right.bar(list(bars), [1e3 * seconds for seconds in bars.values()], 0.6, color=["C0", "C1", "C3"])
    for place, seconds in enumerate(bars.values()):
        right.annotate(
            f"{1e3 * seconds:,.0f} ms", (place, 1e3 * seconds), (0, 3), textcoords="offset points", ha="center", **SMALL
        )
    right.set_ylabel("ms a step")
    right.tick_params(axis="x", labelsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _seconds(part: Part, kind: str, size: int) -> float:
    (found,) = (p["seconds"] for p in part["points"] if (p["kind"], p["tokens"]) == (kind, size))
    return float(found)


def gaps(part: Part) -> Figure:
    """One stream's tokens as they come, while prompts arrive; and the gaps, throughput and waits of all."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    lines = upper.subplots(2, 1, sharex=True)
    end = 1.5 * part["sides"][GROUP]["stream"][-1]
    for axis, name in zip(lines, (BEST, GROUP), strict=True):
        row, color = part["sides"][name], COLORS[name]
        arrived = [at for at in row["arrived"] if at < end]
        axis.vlines([at for at in row["stream"] if at < end], 0, 1, color=color, lw=0.8)
        axis.plot(arrived, [1.12] * len(arrived), "v", color="0.35", ms=5)
        axis.set(yticks=[], ylim=(0, 1.25), xlim=(0, end))
        axis.set_title(f"{name}: a line is a token of one stream, a triangle a prompt that arrives", fontsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
    lines[1].set_xlabel("seconds", **SMALL)
    gap, speed, wait = lower.subplots(1, 3, width_ratios=[1.5, 1, 1])
    names = list(part["sides"])
    for place, key in enumerate(("p50", "p95", "longest")):
        for number, name in enumerate(names):
            at = place + 0.27 * (number - 1)
            gap.bar(at, 1e3 * part["sides"][name][key], 0.25, color=COLORS[name], label=name if not place else None)
    gap.set_xticks(range(3), ["median", "p95", "longest"])
    gap.set_ylabel("gap between tokens, ms")
    gap.legend(**SMALL)
    short = ["1 thread", "2 threads", "group"]
    colors = [COLORS[name] for name in names]
    speed.bar(short, [part["sides"][name]["tokens_per_second"] for name in names], 0.6, color=colors)
    speed.set_ylabel("tokens/s")
    wait.bar(short, [1e3 * part["sides"][name]["mean_ttft"] for name in names], 0.6, color=colors)
    wait.set_ylabel("a prompt's first token, ms")
    for axis in (gap, speed, wait):
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def overhead(part: Part) -> Figure:
    """The first token of a prompt by its length, and each further one, with nobody else there."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    first, further = figure.subplots(1, 2)
    lengths = [int(length) for length in part]
    for name in (BEST, GROUP):
        for axis, key in ((first, "ttft"), (further, "tpot")):
            axis.plot(lengths, [1e3 * part[str(n)][name][key] for n in lengths], "o-", color=COLORS[name], label=name)
    first.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="first token, ms")
    further.set(xscale="log", xlabel="tokens of the prompt", ylabel="each further token, ms", ylim=(0, None))
    further.set_ylim(top=1.3 * further.get_ylim()[1])
    first.legend(**SMALL)
    for axis in (first, further):
        axis.set_xticks(lengths, map(str, lengths))
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    return figure
