"""Drawing, the same way in all lessons: bars, lines, gaps over time, rooflines, boxes. Needs matplotlib.

Pictures are SVG files for light and dark pages (`docs/scheme.py`): black, white and greys follow the page. The colors
C0 to C4 are told apart by color-blind readers, too, and have a contrast of 3 to both backgrounds.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import cycler, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import Row
from docs.scheme import COLORS, ON_DEEP as ON_DEEP, ON_PALE as ON_PALE, themed

rcParams.update(
    {
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "legend.facecolor": "white",
        "svg.fonttype": "none",
        "svg.hashsalt": "stepwise",
    }
)
SMALL: dict[str, Any] = {"fontsize": 8}
Kinds = Mapping[str, tuple[str, str, str]]
"""Mark, color and label of each kind of forward."""
GAPS = {"longest": ("C3", "longest"), "p95": ("C1", "p95"), "p50": ("C0", "median")}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG file; equal numbers give an equal file."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    path.write_text(themed(text.getvalue()), encoding="utf-8")


def ink_on(face: Any) -> str:
    """Return the color of text on a color."""
    red, green, blue = to_rgb(face)
    if red == green == blue:
        return "black"
    return ON_PALE if 0.21 * red + 0.72 * green + 0.07 * blue > 0.45 else ON_DEEP


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def bare(axis: Axes, *sides: str) -> None:
    """Remove sides of the frame: those on top and on the right, or these."""
    axis.spines[list(sides) or ["top", "right"]].set_visible(False)


def named_bars(
    axis: Axes, names: Sequence[str], values: Sequence[float], colors: Any, labels: Any = None, **style: Any
) -> None:
    """Draw a horizontal bar for each name, with its label."""
    bars = axis.barh(range(len(values)), values, color=colors, **style)
    axis.bar_label(bars, labels or [f"{value:,.4g}" for value in values], padding=3, **SMALL)
    axis.set_yticks(range(len(names)), list(names), **SMALL)
    axis.invert_yaxis()
    axis.set_xlim(right=1.45 * max(values))  # room for the labels
    bare(axis)


def grouped_bars(
    axis: Axes, groups: Sequence[str], sides: Mapping[str, Sequence[float]], colors: Sequence[Any], form: str = ""
) -> None:
    """Draw a group of vertical bars for each name, one for each side."""
    width = 0.8 / len(sides)
    for number, ((name, values), color) in enumerate(zip(sides.items(), colors, strict=False)):
        places = [place + width * (number - (len(sides) - 1) / 2) for place in range(len(groups))]
        bars = axis.bar(places, values, 0.93 * width, color=color, label=name)
        if form:
            axis.bar_label(bars, fmt=form, fontsize=7)
    axis.set_xticks(range(len(groups)), list(groups))
    bare(axis)


def lines(
    axis: Axes, xs: Sequence[float], series: Mapping[str, Sequence[float]], colors: Sequence[Any], **settings: Any
) -> None:
    """Draw a line with marks for each series."""
    for (name, values), color in zip(series.items(), colors, strict=False):
        axis.plot(xs, values, "o-", ms=4, color=color, label=name)
    axis.set(**settings)
    bare(axis)


def ticks(axis: Axes, values: Sequence[float], names: Sequence[str] | None = None) -> None:
    """Name exactly these values on the x axis."""
    axis.set_xticks(values, names or [f"{value:,}" for value in values])
    axis.minorticks_off()


def plain_logs(axis: Axes) -> None:
    """Write numbers, not powers of ten, on a logarithmic y axis."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def gaps_over_time(axis: Axes, times: Sequence[float], arrived: Sequence[float], color: str, label: str = "") -> None:
    """Draw the gaps of one stream in milliseconds over time, and a line for each prompt that arrives."""
    for number, at in enumerate(arrived):
        axis.axvline(at, color="0.88", lw=1, zorder=0, label=None if number else "a prompt arrives")
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    axis.plot(times[1:], gaps, ".", ms=4, color=color, label=label or None)
    axis.set(xlabel="seconds")
    plain_logs(axis)


def gap_panels(
    rows: Sequence[Row], places: Sequence[float], base: Row | None = None, *, logarithmic: bool = False
) -> tuple[Figure, Any]:
    """Draw gaps, throughput, and the prompts' time to the first token, by a setting; dashed: those of `base`."""
    figure, axes = panels(10, 3.6, 1, 3, width_ratios=[1.5, 1, 1])
    labels = ("gap between tokens of a stream, ms", "tokens/s, prompts and answers", "mean time to a first token, ms")
    shown = (GAPS, {"tokens_per_second": ("C0", "")}, {"mean_ttft": ("C2", "")})
    for axis, series, label in zip(axes, shown, labels, strict=True):
        for key, (color, name) in series.items():
            factor = 1 if key == "tokens_per_second" else 1e3
            axis.plot(places, [factor * row[key] for row in rows], "o-", ms=4, color=color, label=name)
            if base is not None:
                axis.axhline(factor * base[key], color=color, lw=1, ls="--", zorder=0)
        if logarithmic and factor > 1:
            plain_logs(axis)
        else:
            axis.set_ylim(0, None)
        axis.set_ylabel(label)
        axis.tick_params(labelsize=8)
        axis.grid(color="0.94")
        bare(axis)
    axes[0].legend(**SMALL)
    return figure, axes


def roof(
    axis: Axes, part: Row, kinds: Kinds, ends: tuple[float, float] = (0.25, 1000), *, numbered: bool = True
) -> None:
    """Draw the roof of a machine, and below it the forwards of each kind, `numbered` by size."""
    ridge, flops, bandwidth = part["ridge"], part["flops"], part["bandwidth"]
    places = [ends[0], ridge, max(ends[1], 3 * ridge)]
    axis.plot(places, [min(flops, x * bandwidth) / 1e9 for x in places], "k-", lw=1)
    axis.axvline(ridge, color="0.85", lw=1, zorder=0)
    note: dict[str, Any] = {"textcoords": "offset points", "color": "0.35"} | SMALL
    axis.annotate(f"{flops / 1e9:,.0f} GFLOP/s", (places[2], flops / 1e9), (0, 4), ha="right", **note)
    slope = 0.8 * ridge**0.5
    axis.annotate(f"{bandwidth / 1e9:.0f} GB/s", (slope, slope * bandwidth / 1e9), (-6, 4), ha="right", **note)
    for kind, (mark, color, label) in kinds.items():
        points = [point for point in part["points"] if point["kind"] == kind]
        spots = [(point["intensity"], point["flop"] / point["seconds"] / 1e9) for point in points]
        axis.plot([x for x, _ in spots], [y for _, y in spots], mark, color=color, label=label)
        for point, spot in zip(points, spots, strict=True) if numbered else ():
            text = f"{point['decodes']} + {point['tokens']}" if "decodes" in point else str(point["tokens"])
            style = {"textcoords": "offset points", "color": "0.25", "ha": "center"} | SMALL
            axis.annotate(text, spot, (0, {"prefill": -13, "decode": 6}.get(kind, 18)), **style)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s")
    axis.margins(y=0.12)
    axis.legend(loc="lower right", **SMALL)


def legend(figure: Figure, colors: Mapping[str, Any], columns: int | None = None, place: str = "upper center") -> None:
    """Explain colors outside of the axes."""
    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc=f"outside {place}", ncols=columns or len(handles), frameon=False, **SMALL)


def box(axis: Axes, x: float, y: float, size: tuple[float, float], text: str, face: Any, **style: Any) -> None:
    """Draw a box with its text in the middle."""
    own: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center", "color": ink_on(face)} | style
    axis.add_patch(Rectangle((x, y), *size, facecolor=face, edgecolor=own.pop("edgecolor", "white")))
    axis.text(x + size[0] / 2, y + size[1] / 2, text, **own)


def arrow(axis: Axes, begin: tuple[float, float], end: tuple[float, float], color: str, label: str = "") -> None:
    """Draw an arrow, with a label above its beginning."""
    axis.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=10, color=color, shrinkA=0, shrinkB=0))
    if label:
        axis.text(begin[0] + 0.5, begin[1] + 0.08, label, ha="center", va="bottom", color=color, **SMALL)


def shortened(text: str, room: int) -> str:
    """Return beginning and end of a text, at most `room` characters."""
    if len(text) <= room:
        return text
    return text[: room - room // 2 - 1] + "…" + text[len(text) - room // 2 :] if room > 4 else ""


# --- two engines ------------------------------------------------------------------------------------------------------


def comparison(report: Row) -> Figure:
    """Draw the ratios of two sides with their intervals, and the distribution of all gaps."""
    figure, (left, right) = panels(10, 4, 1, 2)
    ratios = {name: row for name, row in report["comparison"].items() if row["kind"] == "ratio"}
    for place, row in enumerate(ratios.values()):
        low, high = row["interval"] or [row["mean"]] * 2
        left.plot([low, high], [place, place], color="C0", lw=2)
        left.plot([row["mean"]], [place], "o", color="C0")
    left.axvline(1, color="0.5", lw=1, ls="--")
    left.set_yticks(range(len(ratios)), list(ratios), **SMALL)
    left.invert_yaxis()
    left.set_xlabel("first side, as a multiple of the second")
    for name, gaps in report["gaps"].items():
        ranked = sorted(1e3 * gap for gap in gaps)
        right.plot(ranked, [100 * (place + 1) / len(ranked) for place in range(len(ranked))], label=name)
    right.set(xscale="log", xlabel="gap between two tokens, ms", ylabel="% of the gaps that are not longer")
    right.legend(**SMALL)
    for axis in (left, right):
        bare(axis)
    return figure
