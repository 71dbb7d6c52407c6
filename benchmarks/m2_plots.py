"""The plots of milestone 2, drawn from the numbers that `benchmarks.m2_continuous_batching` has measured."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks import ASSETS

COLORS = {"prefill": "C1", "decode": "C0", "held": "0.8"}


def draw_plots(results: dict[str, Any]) -> None:
    """Draw all of them into the docs' assets."""
    drawn = {
        "m2_timeline": timeline(results["timeline"]),
        "m2_throughput": throughput(results["throughput"]),
        "m2_limits": limits(results["limits"]),
        "m2_padding": padding(results["padding"]),
        "m2_walls": walls(results["walls"]),
    }
    for name, figure in drawn.items():
        figure.savefig(ASSETS / f"{name}.png", dpi=110)


def timeline(lanes: dict[str, Any]) -> Figure:
    """Five requests in three places, step by step."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, (kind, lane) in zip(axes, lanes.items(), strict=True):
        cells = lane["cells"]
        for number, row in enumerate(cells):
            group = cells[:3] if number < 3 else cells[3:]
            for step, what in enumerate(row):
                if what != "wait":
                    axis.barh(number, 1, left=step, color=COLORS[what], edgecolor="white")
            if kind == "static":  # a finished row keeps its place until its whole batch has ended
                end = max(map(len, group))
                axis.barh(number, end - len(row), left=len(row), color=COLORS["held"], edgecolor="white", hatch="//")
        axis.set(title=f"{kind}: {lane['steps']} steps", yticks=range(len(cells)))
        axis.set_yticklabels([f"request {number}" for number in range(1, len(cells) + 1)])
        axis.invert_yaxis()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    names = {"prefill": "prefill", "decode": "decode", "held": "ended, place still taken"}
    handles = [Patch(color=COLORS[key], label=name) for key, name in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def throughput(rows: list[dict[str, Any]]) -> Figure:
    """Tokens per second of the three sides."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for offset, (side, label) in enumerate(
        {"per_request": "one by one", "static": "transformers, static", "padded": "padded"}.items()
    ):
        own = [row for row in rows if row["side"] == side]
        places = [place + (offset - 1) * 0.27 for place in range(len(own))]
        bars = left.bar(places, [row["tokens_per_second"] for row in own], width=0.25, label=label)
        left.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        right.bar(places, [row["rows_used"] * 100 for row in own], width=0.25, label=label)
    for axis in (left, right):
        axis.set_xticks([0, 1])
        axis.set_xticklabels(["16 at a time", "64 at a time"])
    left.set(ylabel="output tokens per second", title="Throughput of the same 64 requests")
    left.set_ylim(top=1.35 * max(row["tokens_per_second"] for row in rows))  # room for the legend
    right.set(ylabel="%", title="Row-steps that gave a token")
    left.legend(loc="upper left")
    return figure


def limits(rows: dict[str, list[dict[str, Any]]]) -> Figure:
    """What the two limits do."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    seqs = rows["max_num_seqs"]
    numbers = [row["max_num_seqs"] for row in seqs]
    left.plot(numbers, [row["tokens_per_second"] for row in seqs], "o-", color="C0")
    left.set(xscale="log", xlabel="max_num_seqs", ylabel="tokens per second", title="More at a time")
    left.set_xticks(numbers, [str(number) for number in numbers])
    left.minorticks_off()
    waiting = left.twinx()
    waiting.plot(numbers, [row["mean_tpot"] * 1e3 for row in seqs], "s--", color="C3")
    waiting.set_ylabel("ms per token of one request", color="C3")
    budgets = rows["max_num_batched_tokens"]
    places = range(len(budgets))
    right.bar([p - 0.2 for p in places], [row["mean_ttft"] * 1e3 for row in budgets], width=0.38, label="mean TTFT")
    right.bar(
        [p + 0.2 for p in places], [row["longest_gap"] * 1e3 for row in budgets], width=0.38, label="longest stop"
    )
    right.set_xticks(list(places), [f"{row['max_num_batched_tokens']:,}" for row in budgets])
    right.set(xlabel="max_num_batched_tokens", ylabel="ms", title="More in a step")
    right.legend()
    return figure


def padding(rows: list[dict[str, Any]]) -> Figure:
    """Useful and padded tokens, and KV used of what is reserved, over the steps of the run with 16 places."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    row = next(row for row in rows if "per_step" in row)
    steps = row["per_step"]
    numbers = range(1, len(steps) + 1)
    left.stackplot(
        numbers, [s["useful"] for s in steps], [s["padded"] for s in steps], labels=["tokens", "padding"],
        colors=["C0", "C3"],
    )  # fmt: skip
    left.set(xlabel="step", ylabel="places in the tensors", yscale="symlog", title="What went through the model")
    left.legend()
    mib = 2**20
    right.axhline(row["kv_reserved"] / mib, color="0.5", label="reserved")
    right.fill_between(numbers, [s["kv_used"] / mib for s in steps], color="C2", label="used")
    right.set(xlabel="step", ylabel="MiB", title="KV memory")
    right.legend(loc="center right")
    return figure


def walls(rows: list[dict[str, Any]]) -> Figure:
    """When each request sees its first token, and when it is complete: m1 and m2."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, milestone, title in ((left, "m1", "m1: one after the other"), (right, "m2", "m2: together")):
        first = [row[f"{milestone}_ttft"] for row in rows]
        rest = [row[f"{milestone}_latency"] - row[f"{milestone}_ttft"] for row in rows]
        numbers = [row["request"] for row in rows]
        axis.barh(numbers, first, color="0.75", label="until the first token")
        axis.barh(numbers, rest, left=first, color="C0", label="until complete")
        axis.set(title=title, xlabel="seconds after arrival")
        axis.set_xlim(0, max(row["m1_latency"] for row in rows) * 1.03)
    left.set_ylabel("request")
    left.invert_yaxis()
    left.legend(loc="upper right")
    return figure
