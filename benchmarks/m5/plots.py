"""The plots of lesson 5."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.m5.gaps import WHOLE
from benchmarks.plots import SMALL, Row, bare, box, gap_panels, gaps_over_time, panels, ticks

FILLS = {"decodes": ("C0", "decodes"), "guesses": ("C4", "guesses"), "prompt": ("C1", "pieces of prompts")}
ORIGINS = {
    "plain": ("0.88", "no guess was made"),
    "accepted": ("#8fd6c2", "guessed and right"),
    "corrected": ("#fdb863", "in the place of a wrong guess"),
    "bonus": ("#6aaede", "on top, after guesses that were all right"),
}
METHODS = {"ngram": "C2", "draft_model": "C4"}
LINE = 92  # characters of an answer in one line


def budget(part: Row) -> Figure:
    """Draw the tokens in every step, under both schedules."""
    figure, axes = panels(10, 4.8, 2, 1, sharex=True, sharey=True)
    longest = max(map(len, part["schedules"].values()))
    for axis, (schedule, steps) in zip(axes, part["schedules"].items(), strict=True):
        bottom = [0] * len(steps)
        for key, (color, label) in FILLS.items():
            heights = [step[key] for step in steps]
            axis.bar(range(1, len(steps) + 1), heights, 0.86, bottom, color=color, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        begun = next(number for number, step in enumerate(steps) if step["decodes"])
        stalled = [number + 1 for number, step in enumerate(steps) if number > begun and not step["decodes"]]
        axis.plot(
            stalled, [part["budget"] * 1.06] * len(stalled), "x", color="C3", ms=4, label="no stream gets a token"
        )
        axis.axhline(part["budget"], color="0.4", lw=1, ls="--")
        axis.set(ylabel="tokens", ylim=(0, part["budget"] * 1.15), xlim=(0, longest + 1))
        axis.set_title(f"{schedule}: {len(steps)} steps", fontsize=10, loc="left")
        bare(axis)
    axes[1].set_xlabel("step")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper right", ncols=4, **SMALL)
    return figure


def gaps(part: Row) -> Figure:
    """Draw gaps, throughput, and the waiting time of prompts, by the budget of a step; dashed: whole prompts first."""
    rows, base = list(part["budgets"].values()), part["references"][WHOLE]
    sizes = [row["tokens"] for row in rows]
    figure, axes = gap_panels(rows, sizes, base, logarithmic=True)
    for axis in axes:
        axis.set(xscale="log", xlabel="tokens a step, at most")
        ticks(axis, [size for size in sizes if size & (size - 1) == 0])  # powers of two: others would overlap
    least = 0.9 * base["tokens_per_second"]
    axes[1].axhspan(0, least, color="0.94", zorder=0)
    axes[1].text(sizes[-1], 0.98 * least, "more than a tenth is lost", ha="right", va="top", **SMALL)
    return figure


def stream(part: Row) -> Figure:
    """Draw the gaps of one stream over time, whole prompts first and decodes first."""
    figure, axes = panels(10, 3.4, 1, 2, sharey=True, sharex=True)
    best, rows = part["best"]["side"], part["budgets"] | part["targets"]
    sides = {WHOLE: part["references"][WHOLE], f"decode_first, {best}": rows[best]}
    for axis, (name, row), color in zip(axes, sides.items(), ("C3", "C0"), strict=True):
        gaps_over_time(axis, row["stream"], row["arrived"], color)
        axis.set_title(f"{name}: longest {1e3 * row['longest']:,.0f} ms", fontsize=10)
    axes[0].set_ylabel("ms since the token before")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", **SMALL)
    return figure


def speculation(part: Row) -> Figure:
    """Draw tokens/s as times those without guesses, by text and method; above a bar: tokens of a verification."""
    batches = list(next(iter(part["kinds"].values())))
    figure, grid = panels(10, 2.9 * len(batches), len(batches), len(part["kinds"]), sharey=True, squeeze=False)
    for batch, axes in zip(batches, grid, strict=True):
        for axis, (kind, by_batch) in zip(axes, part["kinds"].items(), strict=True):
            _guesses(axis, {name: row for name, row in by_batch[batch].items() if name != "no guesses"})
            axis.set_title(f"{kind}, {'one' if batch == '1' else batch} at a time", fontsize=10)
        axes[0].set_ylabel("tokens/s, times no guesses")
    handles = [Patch(color="none", label="above a bar: tokens that a verification brought")]
    figure.legend(handles=handles, loc="outside lower center", **SMALL)
    return figure


def _guesses(axis: Axes, sides: Row) -> None:
    colors = [METHODS[name.split(",")[0]] for name in sides]
    bars = axis.bar(range(len(sides)), [row["times_none"] for row in sides.values()], 0.6, color=colors)
    labels = [f"{row['accept_length']:.1f}" if row["drafted"] else "" for row in sides.values()]
    axis.bar_label(bars, labels, fontsize=7, color="0.3", padding=2)
    axis.axhline(1, color="0.4", lw=1, ls="--", zorder=0.5)
    names = [name.replace("draft_model, ", "draft\n").replace("ngram, ", "ngram\n") for name in sides]
    axis.set_xticks(range(len(sides)), names, **SMALL)
    axis.margins(y=0.12)
    bare(axis)


def origins(part: Row) -> Figure:
    """Draw one answer of each kind by each method, its tokens colored by their origin."""
    answers = [(kind, method, answer) for kind, sides in part.items() for method, answer in sides.items()]
    laid_out = [lines_of(answer["tokens"]) for _, _, answer in answers]
    height = sum(len(lines) + 1.6 for lines in laid_out) + 1.5
    figure = Figure(figsize=(10, 0.235 * height))
    axis = figure.add_axes((0.015, 0.01, 0.97, 0.98))
    handles = [Patch(color=color, label=label) for color, label in ORIGINS.values()]
    axis.legend(handles=handles, loc="upper left", ncols=4, frameon=False, borderaxespad=0, **SMALL)
    y = 1.8
    for (kind, method, answer), lines in zip(answers, laid_out, strict=True):
        title = f"{kind}, {method}: {len(answer['tokens'])} tokens in {answer['steps']} steps"
        axis.text(0, y, title, va="center", fontsize=9)
        for line in lines:
            y += 1
            for start, text, origin in line:
                box(
                    axis, start, y - 0.44, (len(text), 0.88), text, ORIGINS[origin][0], fontsize=7.5, family="monospace"
                )
        y += 1.6
    axis.set(xlim=(0, LINE), ylim=(y - 0.8, -0.2))
    axis.axis("off")
    return figure


def lines_of(tokens: list[list[str]]) -> list[list[tuple[int, str, str]]]:
    """Return column, text and origin of each token's box, line by line."""
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


PLOTS = {
    "m5_budget": ("steps", budget),
    "m5_gaps": ("gaps", gaps),
    "m5_stream": ("gaps", stream),
    "m5_speculation": ("speculation", speculation),
    "m5_origins": ("origins", origins),
}
