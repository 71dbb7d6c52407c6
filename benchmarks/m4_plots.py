"""The plots of milestone 4, drawn from the numbers that `benchmarks.m4_radix_cache` has measured."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks import ASSETS

Part = dict[str, Any]
COLORS = {"m3": "C1", "m4, no sharing": "0.6", "m4, hashes": "C2", "m4, tree": "C0", "m4": "C0"}
STRATEGIES = {"lru": "C0", "fifo": "C9", "lfu": "C1", "slru": "C4", "priority": "C3"}
DESIGNS = {"tree": "C0", "hashes": "C2"}
OPERATIONS = {"match": "C0", "insert": "C2", "evict": "C3", "lock": "0.6"}
SMALL: dict[str, Any] = {"fontsize": 8}


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw those whose parts are there into the docs' assets."""
    plots: dict[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
        "m4_reuse": (reuse, ("reuse_0_6b", "reuse_embedded")),
        "m4_hit_rate": (hit_rate, ("eviction",)),
        "m4_control_plane": (control_plane, ("control_plane",)),
        "m4_designs": (designs, ("designs",)),
        "m4_decode_gaps": (decode_gaps, ("decode_gaps",)),
    }
    for name, (draw, needed) in plots.items():
        if all(part in parts for part in needed):
            draw(*[parts[part] for part in needed]).savefig(folder / f"{name}.png", dpi=110)


def reuse(random: Part, embedded: Part) -> Figure:
    """Prompt tokens computed, time to the first token, and total time of every side, for both models."""
    models = {"0.6B shape, bfloat16": random, "embedded, float32": embedded}
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(len(models), 3)
    for row, (model, part) in zip(axes, models.items(), strict=True):
        sides = part["sides"]
        panels = {
            "prompt tokens computed": ("computed", "{:,.0f}"),
            "mean time to the first token, s": ("mean_ttft", "{:,.3g}"),
            "time for all requests, s": ("seconds", "{:,.3g}"),
        }
        for axis, (title, (key, form)) in zip(row, panels.items(), strict=True):
            values = [side[key] for side in sides.values()]
            bars = axis.barh(range(len(values)), values, color=[COLORS[name] for name in sides])
            axis.bar_label(bars, [form.format(value) for value in values], padding=3, **SMALL)
            axis.invert_yaxis()
            axis.set_xlim(right=1.25 * max(values))
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.set_yticks(range(len(values)), list(sides) if axis is row[0] else [""] * len(values), **SMALL)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(model, fontsize=9)
    return figure


def hit_rate(part: Part) -> Figure:
    """Hit rate against capacity: of all tenants, and of those who pay."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {"all": ("All tenants", "ceiling"), "paying": ("Tenants with priority", "ceiling_paying")}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (who, (title, ceiling)) in zip(axes, panels.items(), strict=True):
        sizes = part["capacities"]
        axis.axhline(100 * part[ceiling], color="0.5", lw=1, ls="--", zorder=0)
        axis.annotate(
            f"room for all: {part[ceiling]:.1%}",
            (sizes[0], 100 * part[ceiling]),
            (0, 4),
            textcoords="offset points",
            color="0.4",
            **SMALL,
        )
        for name in part["strategies"]:
            color = STRATEGIES.get(name, "C5")
            rates = [100 * rate for rate in part["strategies"][name][who]]
            style: Part = {"lw": 4, "alpha": 0.45} if name == "lru" else {}  # others lie on it
            axis.plot(sizes, rates, "o-", color=color, ms=4, label=f"tree, {name}", **style)
        rates = [100 * rate for rate in part["hashes"][who]]
        axis.plot(sizes, rates, color="k", marker="x", ms=5, lw=0.8, ls=(0, (5, 4)), label="hashes, lru")
        axis.set(xscale="log", xticks=sizes, xlabel="capacity, tokens", ylim=(0, 100))
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1024:g}k"))
        axis.minorticks_off()
        axis.grid(axis="y", color="0.92")
    axes[0].set_ylabel("% of prompt tokens found")
    axes[1].legend(fontsize=8, loc="lower right")
    return figure


def control_plane(part: Part) -> Figure:
    """Tokens per second through the cache, with and without the walk."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axis = figure.subplots()
    sides = part["sides"]
    speeds = [side["tokens_per_second"] / 1e6 for side in sides.values()]
    colors = ["C0" if "kept" in name else "0.6" for name in sides]
    bars = axis.barh(range(len(sides)), speeds, color=colors)
    labels = [
        f"{v:.1f}  ({side['us_per_sequence']:.0f} us a sequence)"
        for v, side in zip(speeds, sides.values(), strict=True)
    ]
    axis.bar_label(bars, labels, padding=3, **SMALL)
    axis.set_yticks(range(len(sides)), list(sides), **SMALL)
    axis.invert_yaxis()
    axis.set_xlim(right=1.3 * max(speeds))
    axis.set_xlabel("million tokens per second through match, evict and insert", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def designs(part: Part) -> Figure:
    """Tree and hashes at each page size: what they find, how long they take, and how much memory their books need."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    found, seconds, memory = figure.subplots(1, 3)
    sides = list(part["sides"].values())
    pages = list(dict.fromkeys(side["page_size"] for side in sides))
    for number, (design, color) in enumerate(DESIGNS.items()):
        own = [side for side in sides if side["design"] == design]
        places = [index + 0.4 * (number - 0.5) for index in range(len(pages))]
        rates = found.bar(places, [100 * side["hit_rate"] for side in own], 0.38, color=color, label=design)
        found.bar_label(rates, fmt="{:.1f}", fontsize=7)
        totals = [sum(side["us_per_request"].values()) for side in own]
        bars = seconds.bar(places, totals, 0.38, color=color, label=design)
        seconds.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        bars = memory.bar(places, [side["bytes_per_token"] for side in own], 0.38, color=color, label=design)
        memory.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    titles = {
        found: "% of prompt tokens found",
        seconds: "microseconds per request in the cache",
        memory: "bytes of books per cached token",
    }
    for axis, title in titles.items():
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(pages)), [str(size) for size in pages])
        axis.set_xlabel("page size")
        axis.spines[["top", "right"]].set_visible(False)
    found.set_ylim(0, 100)
    for axis in (seconds, memory):
        axis.set_yscale("log")
        axis.margins(y=0.15)
    found.legend(fontsize=8, loc="upper left", ncols=2)
    return figure


def decode_gaps(part: Part) -> Figure:
    """The gaps of one stream over time in every situation, and the longest one by length and number of prompts."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[1.25, 1])
    upper = grid[0].subgridspec(1, len(part["situations"]) - 1)
    first: Axes | None = None
    for place, (name, sides) in enumerate(list(part["situations"].items())[1:]):
        axis = figure.add_subplot(upper[place], sharey=first)
        first = first or axis
        for number, arrival in enumerate(sides["m4"]["arrived"]):
            axis.axvline(arrival, color="0.88", lw=1, zorder=0, label=None if number else "a prompt arrives (m4)")
        for side in ("m3", "m4"):
            times = sides[side]["times"]
            gaps = [1e3 * (after - before) for before, after in pairwise(times)]
            axis.plot(times[1:], gaps, ".", ms=4, color=COLORS[side], label=side)
        axis.set_title(name, fontsize=9)
        axis.set(yscale="log", xlabel="seconds")
        axis.tick_params(labelsize=8)
        if axis is not first:
            axis.tick_params(labelleft=False)
        else:
            axis.set_ylabel("ms since the token before")
    assert first is not None
    first.legend(fontsize=8)
    lower = grid[1].subgridspec(1, 2)
    panels = {
        "by_length": ("One prompt arrives", "its tokens"),
        "by_count": (f"Prompts of {part['by_count_length']:,} tokens, step after step", "how many"),
    }
    for place, (key, (title, label)) in enumerate(panels.items()):
        axis = figure.add_subplot(lower[place])
        numbers = [int(number) for number in part[key]]
        for side in ("m3", "m4"):
            longest = [1e3 * row[side]["longest"] for row in part[key].values()]
            axis.plot(numbers, longest, "o-", color=COLORS[side], label=side, ms=4)
        ticks = [number for number in numbers if 12 * number >= numbers[-1]]  # smaller ones would overlap
        axis.set(xlabel=label, ylabel="longest gap, ms", ylim=(0, None), xticks=ticks)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    return figure
