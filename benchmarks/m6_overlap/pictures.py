"""The two lanes of some decode steps, host and device, drawn: in normal order and overlapped."""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.m6_overlap.lanes import SHOWN, Bar, recorded, typical
from benchmarks.plots import SMALL, bare, ink_on, legend, panels, save

HOST = {"schedule": "#8fd6c2", "execute": "#fdb863", "sample": "#d9c3e8", "update": "#92c5de"}
NAMES = {"schedule": "schedule", "execute": "inputs, launch", "sample": "choose tokens", "update": "update, text"}
WAITS, DEVICE = "0.88", "#d6604d"


def draw_lanes(axis: Axes, bars: Sequence[Bar], first: int, origin: float, end: float) -> None:
    """Draw the lanes of host and device from `origin` to `end`, in milliseconds, with the number of each bar's step."""
    room = 0.022 * 1e3 * (end - origin)
    for bar in sorted(bars, key=lambda bar: bar.lane == "waits"):  # over the phases
        begin, stop = 1e3 * (max(bar.begin, origin) - origin), 1e3 * (min(bar.end, end) - origin)
        if stop <= begin:
            continue
        color = WAITS if bar.lane == "waits" else DEVICE if bar.lane == "device" else HOST[bar.name]
        place = 0 if bar.lane == "device" else 1
        axis.broken_barh([(begin, stop - begin)], (place + 0.1, 0.8), facecolor=color, edgecolor="white", lw=0.6)
        if (bar.lane == "device" or bar.name == "update") and stop - begin > room:
            text = f"N{bar.step - first:+d}" if bar.step != first else "N"
            axis.text((begin + stop) / 2, place + 0.5, text, color=ink_on(color), ha="center", va="center", fontsize=7)
    axis.set(ylim=(0, 2))
    axis.set_yticks([0.5, 1.5], ["device", "host"], **SMALL)
    axis.tick_params(axis="y", length=0)
    bare(axis, "top", "right", "left")


def lanes(ways: dict[str, list[Bar]]) -> Figure:
    """Draw some steps of each way, one below the other, over the same time."""
    figure, axes = panels(10, 3.9, len(ways), 1, sharex=True)
    found = {name: typical(bars) for name, bars in ways.items()}
    longest = max(end - begin for _, begin, end in found.values())
    for axis, (name, bars) in zip(axes, ways.items(), strict=True):
        first, begin, end = found[name]
        draw_lanes(axis, bars, first, begin, begin + longest)
        axis.axvline(1e3 * (end - begin), color="0.3", lw=1, ls=":")
        axis.set_title(f"{name}: {SHOWN} steps in {1e3 * (end - begin):.1f} ms", fontsize=10, loc="left")
    axes[-1].set(xlabel="ms", xlim=(0, 1e3 * longest))
    colors = {name: HOST[phase] for phase, name in NAMES.items()}
    legend(figure, colors | {"the host waits": WAITS, "the device computes": DEVICE}, place="lower center")
    return figure


def draw_pictures(folder: Path) -> None:
    """Draw the picture into a folder."""
    torch.set_num_threads(1)
    ways = {"normal": recorded(False), "overlapped": recorded(True)}
    save(lanes(ways), folder / "m6_overlap_lanes.svg")
