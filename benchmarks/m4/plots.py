"""The plots of lesson 4."""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.plots import SMALL, Row, bare, gaps_over_time, lines, panels, ticks

COLORS = {"m3": "C1", "m4, no sharing": "0.6", "m4, hashes": "C2", "m4, tree": "C0", "m4": "C0"}
STRATEGIES = {"lru": "C0", "fifo": "0.5", "lfu": "C1", "slru": "C4", "priority": "C3"}


def hit_rate(part: Row) -> Figure:
    """Draw the hit rate against the capacity: of all tenants, and of those with priority."""
    figure, axes = panels(10, 4.2, 1, 2, sharey=True)
    sizes = part["capacities"]
    shown = {"all": ("All tenants", "ceiling"), "paying": ("Tenants with priority", "ceiling_paying")}
    for axis, (tenants, (title, ceiling)) in zip(axes, shown.items(), strict=True):
        axis.axhline(100 * part[ceiling], color="0.5", lw=1, ls="--", zorder=0)
        text = f"room for all: {part[ceiling]:.1%}"
        axis.annotate(text, (sizes[0], 100 * part[ceiling]), (0, 4), textcoords="offset points", color="0.4", **SMALL)
        for name, rates in part["strategies"].items():
            style: Row = {"lw": 4, "alpha": 0.45} if name == "lru" else {}  # others lie on it
            own = [100 * rate for rate in rates[tenants]]
            axis.plot(sizes, own, "o-", color=STRATEGIES[name], ms=4, label=f"tree, {name}", **style)
        hashes = [100 * rate for rate in part["hashes"][tenants]]
        axis.plot(sizes, hashes, color="k", marker="x", ms=5, lw=0.8, ls=(0, (5, 4)), label="hashes, lru")
        axis.set(xscale="log", xticks=sizes, xlabel="capacity, tokens", ylim=(0, 100))
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1024:g}k"))
        axis.minorticks_off()
        axis.grid(axis="y", color="0.92")
    axes[0].set_ylabel("% of prompt tokens found")
    axes[1].legend(fontsize=8, loc="lower right")
    return figure


def decode_gaps(part: Row) -> Figure:
    """Draw the gaps of one stream over time in every situation, and the longest one by length and number of prompts."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    situations = dict(list(part["situations"].items())[1:])
    axes = upper.subplots(1, len(situations), sharey=True)
    for axis, (name, sides) in zip(axes, situations.items(), strict=True):
        for side in ("m3", "m4"):
            arrived = sides[side]["arrived"] if side == "m4" else []
            gaps_over_time(axis, sides[side]["stream"], arrived, COLORS[side], side)
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("ms since the token before")
    axes[0].legend(fontsize=8)
    shown = {
        "by_length": ("One prompt arrives", "its tokens"),
        "by_count": (f"Prompts of {part['by_count_length']:,} tokens, step after step", "number of prompts"),
    }
    for axis, (key, (title, label)) in zip(lower.subplots(1, 2), shown.items(), strict=True):
        numbers = [int(number) for number in part[key]]
        longest = {side: [1e3 * row[side]["longest"] for row in part[key].values()] for side in ("m3", "m4")}
        lines(axis, numbers, longest, [COLORS[side] for side in longest], xlabel=label, ylabel="longest gap, ms")
        ticks(axis, [number for number in numbers if 12 * number >= numbers[-1]])  # smaller ones would overlap
        axis.set_ylim(0, None)
        axis.set_title(title, fontsize=9)
        bare(axis)
    return figure


PLOTS = {"m4_hit_rate": ("eviction", hit_rate), "m4_decode_gaps": ("decode_gaps", decode_gaps)}
