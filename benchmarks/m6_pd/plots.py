"""The plots of lesson 6, part 2."""

from matplotlib.figure import Figure

from benchmarks.plots import SMALL, Row, bare, grouped_bars, lines, panels, roof, ticks

KINDS = {
    "prefill": ("o", "C1", "a prompt of so many tokens"),
    "decode": ("s", "C0", "so many requests decode"),
    "both": ("D", "C3", "both in one step"),
}
COLORS = ("C1", "0.7", "C0")
"""Of the sides: one engine with one thread, with two threads, and the group."""


def roofline(part: Row) -> Figure:
    """Draw steps below the roof; and the time of a step, of each kind and with both in it."""
    figure, (left, right) = panels(10, 4, 1, 2, width_ratios=[1.6, 1])
    roof(left, part, KINDS, (0.6, 900))
    left.set_yticks([20, 50, 100, 200], ["20", "50", "100", "200"])
    left.minorticks_off()
    (both,) = (point for point in part["points"] if point["kind"] == "both")
    seconds = {(point["kind"], point["tokens"]): point["seconds"] for point in part["points"]}
    bars = {
        f"{both['decodes']} decode": seconds["decode", both["decodes"]],
        f"a prompt of {both['tokens']}": seconds["prefill", both["tokens"]],
        "both in one step": both["seconds"],
    }
    drawn = right.bar(list(bars), [1e3 * value for value in bars.values()], 0.6, color=["C0", "C1", "C3"])
    right.bar_label(drawn, fmt="{:,.0f} ms", padding=3, **SMALL)
    right.set_ylabel("ms a step")
    right.tick_params(axis="x", labelsize=8)
    for axis in (left, right):
        bare(axis)
    return figure


def gaps(part: Row) -> Figure:
    """Draw one stream's tokens over time, while prompts arrive; and the gaps, throughput and waits of all."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    tokens = upper.subplots(2, 1, sharex=True)
    sides = part["sides"]
    alone, _, group = sides
    end = 1.5 * sides[group]["stream"][-1]
    for axis, name, color in zip(tokens, (alone, group), COLORS[::2], strict=True):
        arrived = [at for at in sides[name]["arrived"] if at < end]
        axis.vlines([at for at in sides[name]["stream"] if at < end], 0, 1, color=color, lw=0.8)
        axis.plot(arrived, [1.12] * len(arrived), "v", color="0.35", ms=5)
        axis.set(yticks=[], ylim=(0, 1.25), xlim=(0, end))
        axis.set_title(f"{name}: a line is a token of one stream, a triangle a prompt that arrives", fontsize=9)
        bare(axis, "top", "right", "left")
    tokens[1].set_xlabel("seconds", **SMALL)
    gap, speed, wait = lower.subplots(1, 3, width_ratios=[1.5, 1, 1])
    own = {name: [1e3 * row[key] for key in ("p50", "p95", "longest")] for name, row in sides.items()}
    grouped_bars(gap, ["median", "p95", "longest"], own, COLORS)
    gap.set_ylabel("gap between tokens, ms")
    gap.set_ylim(top=1.4 * gap.get_ylim()[1])  # room for the legend
    gap.legend(**SMALL)
    short = ["1 thread", "2 threads", "group"]
    speed.bar(short, [row["tokens_per_second"] for row in sides.values()], 0.6, color=COLORS)
    speed.set_ylabel("tokens/s")
    wait.bar(short, [1e3 * row["mean_ttft"] for row in sides.values()], 0.6, color=COLORS)
    wait.set_ylabel("a prompt's first token, ms")
    for axis in (gap, speed, wait):
        axis.tick_params(labelsize=8)
        bare(axis)
    return figure


def overhead(part: Row) -> Figure:
    """Draw the first token of a prompt by its length, and each further one, of a request alone."""
    figure, (first, further) = panels(10, 3, 1, 2)
    lengths, (alone, _, group) = [int(length) for length in part], next(iter(part.values()))
    for axis, key, label in ((first, "ttft", "first token, ms"), (further, "tpot", "each further token, ms")):
        own = {name: [1e3 * row[name][key] for row in part.values()] for name in (alone, group)}
        lines(axis, lengths, own, COLORS[::2], xlabel="tokens of the prompt", ylabel=label)
        axis.set_xscale("log")
        ticks(axis, lengths, [str(length) for length in lengths])
    first.set_yscale("log")
    further.set_ylim(0, 1.3 * further.get_ylim()[1])
    first.legend(**SMALL)
    return figure


PLOTS = {f"m6_pd_{draw.__name__}": (draw.__name__, draw) for draw in (roofline, gaps, overhead)}
