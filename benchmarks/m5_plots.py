"""The plots of milestone 5, drawn from the numbers that `benchmarks.m5_chunked_prefill_spec` has measured."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import ASSETS
from benchmarks.m5_gaps import WHOLE

Part = dict[str, Any]
FILLS = {"decodes": ("C0", "decodes"), "guesses": ("C9", "guesses"), "prompt": ("C1", "pieces of prompts")}
ORIGINS = {
    "plain": ("0.88", "no guess was made"),
    "accepted": ("#a6dba0", "guessed and right"),
    "corrected": ("#fdb863", "in the place of a wrong guess"),
    "bonus": ("#92c5de", "on top, after guesses that were all right"),
}
METHODS = {"ngram": "C2", "draft_model": "C4"}
LINE = 92  # characters of an answer in one line
SMALL: Part = {"fontsize": 8}


def draw_plots(parts: dict[str, Part], folder: Path = ASSETS) -> None:
    """Draw those whose parts are there into the docs' assets."""
    plots: dict[str, tuple[Callable[[Part], Figure], str]] = {
        "m5_budget": (budget, "steps"),
        "m5_gaps": (gaps, "gaps"),
        "m5_stream": (stream, "gaps"),
        "m5_speculation": (speculation, "speculation"),
        "m5_origins": (origins, "origins"),
    }
    for name, (draw, needed) in plots.items():
        if needed in parts:
            draw(parts[needed]).savefig(folder / f"{name}.png", dpi=110)


def budget(part: Part) -> Figure:
    """What every step was filled with, under both schedules."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    longest = max(map(len, part["schedules"].values()))
    for axis, (schedule, steps) in zip(axes, part["schedules"].items(), strict=True):
        bottom = [0] * len(steps)
        for key, (color, label) in FILLS.items():
            heights = [step[key] for step in steps]
            axis.bar(range(1, len(steps) + 1), heights, 0.86, bottom, color=color, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        # Whoever has begun to answer, and gets no token.
        begun = next(number for number, step in enumerate(steps) if step["decodes"])
        stalled = [number + 1 for number, step in enumerate(steps) if number > begun and not step["decodes"]]
        axis.plot(stalled, [part["budget"] * 1.06] * len(stalled), "x", color="C3", ms=4, label="nobody decodes")
        axis.axhline(part["budget"], color="0.4", lw=1, ls="--")
        axis.set(ylabel="tokens", ylim=(0, part["budget"] * 1.15), xlim=(0, longest + 1))
        axis.set_title(f"{schedule}: {len(steps)} steps", fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("step")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, **SMALL)
    return figure


def gaps(part: Part) -> Figure:
    """Gaps, throughput, and how long the prompts wait, by the budget of a step; dashed: whole prompts first."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    gap, speed, wait = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    sizes = [row["tokens"] for row in part["budgets"].values()]
    rows, base = list(part["budgets"].values()), part["references"][WHOLE]
    for key, (color, label) in {
        "longest": ("C3", "longest"),
        "p95": ("C1", "p95"),
        "p50": ("C0", "median"),
    }.items():
        gap.plot(sizes, [1e3 * row[key] for row in rows], "o-", ms=4, color=color, label=label)
        gap.axhline(1e3 * base[key], color=color, lw=1, ls="--", zorder=0)
    gap.plot([], [], color="0.5", lw=1, ls="--", label="prefill_first, whole prompts")
    gap.set(yscale="log", ylabel="gap between tokens of a stream, ms")
    figure.legend(*gap.get_legend_handles_labels(), loc="outside upper left", ncols=4, **SMALL)
    speed.plot(sizes, [row["tokens_per_second"] for row in rows], "o-", ms=4, color="C0")
    speed.axhline(base["tokens_per_second"], color="C0", lw=1, ls="--")
    speed.axhspan(0, 0.9 * base["tokens_per_second"], color="0.94", zorder=0)
    speed.text(sizes[-1], 0.88 * base["tokens_per_second"], "more than a tenth is lost", ha="right", va="top", **SMALL)
    speed.set(ylim=(0, None), ylabel="tokens/s, of prompts and answers")
    wait.plot(sizes, [1e3 * row["mean_ttft"] for row in rows], "o-", ms=4, color="C2")
    wait.axhline(1e3 * base["mean_ttft"], color="C2", lw=1, ls="--")
    wait.set(yscale="log", ylabel="mean time to a prompt's first token, ms")
    for axis in (gap, speed, wait):
        _log_ticks(axis, sizes)
    for axis in (gap, wait):
        _plain_logs(axis)
    return figure


def stream(part: Part) -> Figure:
    """The gaps of one stream over time, whole prompts first and decodes first."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    best, rows = part["best"]["side"], part["budgets"] | part["targets"]
    sides = {"prefill_first, whole prompts": part["references"][WHOLE], f"decode_first, {best}": rows[best]}
    axes = figure.subplots(1, 2, sharey=True, sharex=True)
    for axis, (name, row), color in zip(axes, sides.items(), ("C3", "C0"), strict=True):
        for number, arrival in enumerate(row["arrived"]):
            axis.axvline(arrival, color="0.88", lw=1, zorder=0, label=None if number else "a prompt arrives")
        times = row["stream"]
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        axis.vlines(times[1:], 0.1, gaps, color=color, lw=0.6, alpha=0.5)
        axis.plot(times[1:], gaps, ".", ms=4, color=color)
        axis.set(yscale="log", xlabel="seconds", ylim=(0.7 * min(gaps), None))
        axis.set_title(f"{name}: longest {max(gaps):,.0f} ms", fontsize=10)
        _plain_logs(axis)
    axes[0].set_ylabel("ms since the token before")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", **SMALL)
    axes[0].set_ylim(min(axis.get_ylim()[0] for axis in axes), None)
    return figure


def speculation(part: Part) -> Figure:
    """Tokens/s as times those without guesses, by text and by method; above each bar what a verification brought."""
    batches = list(next(iter(part["kinds"].values())))
    figure = Figure(figsize=(10, 2.9 * len(batches)), layout="constrained")
    grid = figure.subplots(len(batches), len(part["kinds"]), sharey=True, squeeze=False)
    for batch, axes in zip(batches, grid, strict=True):
        for axis, (kind, by_batch) in zip(axes, part["kinds"].items(), strict=True):
            sides = {name: row for name, row in by_batch[batch].items() if row is not by_batch[batch]["no guesses"]}
            colors = [METHODS[name.split(",")[0]] for name in sides]
            bars = axis.bar(range(len(sides)), [row["times_none"] for row in sides.values()], 0.6, color=colors)
            labels = [f"{row['accept_length']:.1f}" if row["drafted"] else "" for row in sides.values()]
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
            axis.bar_label(bars, labels, fontsize=7, color="0.3", padding=2, bbox=box)
            axis.axhline(1, color="0.4", lw=1, ls="--", zorder=0.5)
            names = [name.replace("draft_model, ", "draft\n").replace("ngram, ", "ngram\n") for name in sides]
            axis.set_xticks(range(len(sides)), names, **SMALL)
            axis.set_title(f"{kind}, {'one' if batch == '1' else batch} at a time", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(y=0.12)
        axes[0].set_ylabel("tokens/s, times no guesses")
    handles = [Patch(color="none", label="above a bar: tokens that a verification brought")]
    figure.legend(handles=handles, loc="outside lower center", **SMALL)
    return figure


def origins(part: Part) -> Figure:
    """One answer of each kind by each method, its tokens coloured by where they came from."""
    answers = [(kind, method, answer) for kind, sides in part.items() for method, answer in sides.items()]
    laid_out = [lines_of(answer["tokens"]) for _, _, answer in answers]
    height = sum(len(lines) + 1.6 for lines in laid_out) + 1.5
    figure = Figure(figsize=(10, 0.235 * height))
    axis = figure.add_axes((0.015, 0.01, 0.97, 0.98))
    y = 0.0
    handles = [Patch(color=color, label=label) for color, label in ORIGINS.values()]
    axis.legend(handles=handles, loc="upper left", ncols=4, frameon=False, borderaxespad=0, **SMALL)
    y += 1.8
    for (kind, method, answer), lines in zip(answers, laid_out, strict=True):
        num_tokens = len(answer["tokens"])
        axis.text(0, y, f"{kind}, {method}: {num_tokens} tokens in {answer['steps']} steps", va="center", fontsize=9)
        for line in lines:
            y += 1
            for start, text, origin in line:
                box = Rectangle((start, y - 0.44), len(text), 0.88, facecolor=ORIGINS[origin][0], edgecolor="white")
                axis.add_patch(box)
                middle = start + len(text) / 2
                axis.text(middle, y, text, ha="center", va="center", fontsize=7.5, family="monospace")
        y += 1.6
    axis.set(xlim=(0, LINE), ylim=(y - 0.8, -0.2))
    axis.axis("off")
    return figure


def lines_of(tokens: list[list[str]]) -> list[list[tuple[int, str, str]]]:
    """Where each token's box begins, its text and its origin, line by line."""
    lines: list[list[tuple[int, str, str]]] = [[]]
    column = 0
    for raw, origin in tokens:
        text = raw.replace("\n", "\u21b5").replace("$", r"\$")
        if column + len(text) > LINE:
            lines.append([])
            column = 0
        lines[-1].append((column, text, origin))
        column += len(text)
    return lines


def _plain_logs(axis: Axes) -> None:
    """Numbers, not powers of ten, on a logarithmic axis of milliseconds."""
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _log_ticks(axis: Axes, sizes: list[int]) -> None:
    """Budgets on a logarithmic axis, named as they are."""
    axis.set_xscale("log")
    shown = [size for size in sizes if size & (size - 1) == 0]  # powers of two: others would overlap
    axis.set_xticks(shown, [f"{size:,}" for size in shown])
    axis.minorticks_off()
    axis.set_xlabel("tokens a step, at most")
    axis.tick_params(labelsize=8)
    axis.grid(color="0.94")
    axis.spines[["top", "right"]].set_visible(False)
