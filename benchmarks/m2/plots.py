"""The plots of lesson 2."""

from matplotlib.figure import Figure

from benchmarks.plots import Row, grouped_bars, legend, panels, ticks

COLORS = {"prefill": "C1", "decode": "C0", "held": "0.8"}
SIDES = {"per_request": "one by one", "static": "transformers, static", "padded": "padded"}


def timeline(lanes: Row) -> Figure:
    """Draw five requests in three places, step by step."""
    figure, axes = panels(9, 3.8, 2, 1, sharex=True)
    for axis, (kind, lane) in zip(axes, lanes.items(), strict=True):
        cells = lane["cells"]
        for number, row in enumerate(cells):
            for step, state in enumerate(row):
                if state != "wait":
                    axis.barh(number, 1, left=step, color=COLORS[state], edgecolor="white")
            if kind == "static":  # a finished row keeps its place until its whole batch has ended
                end = max(map(len, cells[:3] if number < 3 else cells[3:]))
                held = {"color": COLORS["held"], "edgecolor": "white", "hatch": "//"}
                axis.barh(number, end - len(row), left=len(row), **held)
        axis.set(title=f"{kind}: {lane['steps']} steps", yticks=range(len(cells)))
        axis.set_yticklabels([f"request {number}" for number in range(1, len(cells) + 1)])
        axis.invert_yaxis()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    names = {"prefill": "prefill", "decode": "decode", "held": "ended, place still taken"}
    legend(figure, {label: COLORS[key] for key, label in names.items()}, place="lower center")
    return figure


def throughput(part: Row) -> Figure:
    """Draw tokens per second of the three sides, and the share of rows that gave a token."""
    figure, (left, right) = panels(9, 3.4, 1, 2)
    own = {label: [row for row in part["rows"] if row["side"] == side] for side, label in SIDES.items()}
    groups = ["16 at a time", "64 at a time"]
    speeds = {label: [row["tokens_per_second"] for row in rows] for label, rows in own.items()}
    grouped_bars(left, groups, speeds, ("C0", "C1", "C2"), "{:,.0f}")
    used = {label: [row["rows_used"] * 100 for row in rows] for label, rows in own.items()}
    grouped_bars(right, groups, used, ("C0", "C1", "C2"))
    left.set(ylabel="output tokens per second", title="Throughput of the same requests")
    left.set_ylim(top=1.6 * max(map(max, speeds.values())))  # room for the legend
    right.set(ylabel="%", title="Row-steps that gave a token")
    left.legend(loc="upper left")
    return figure


def limits(part: Row) -> Figure:
    """Draw throughput and waiting by the two limits."""
    figure, (left, right) = panels(9, 3.4, 1, 2)
    numbers = [row["max_num_seqs"] for row in part["max_num_seqs"]]
    left.plot(numbers, [row["tokens_per_second"] for row in part["max_num_seqs"]], "o-", color="C0")
    left.set(xscale="log", xlabel="max_num_seqs", ylabel="tokens per second", title="More at a time")
    ticks(left, numbers)
    waiting = left.twinx()
    waiting.plot(numbers, [row["mean_tpot"] * 1e3 for row in part["max_num_seqs"]], "s--", color="C3")
    waiting.set_ylabel("ms per token of one request", color="C3")
    budgets = part["max_num_batched_tokens"]
    series = {"mean TTFT": "mean_ttft", "longest stop": "longest_gap"}
    times = {label: [row[key] * 1e3 for row in budgets] for label, key in series.items()}
    grouped_bars(right, [f"{row['max_num_batched_tokens']:,}" for row in budgets], times, ("C0", "C1"))
    right.set(xlabel="max_num_batched_tokens", ylabel="ms", title="More in a step")
    right.set_ylim(top=1.3 * right.get_ylim()[1])  # room for the legend
    right.legend(loc="upper left", ncols=2)
    return figure


def padding(rows: list[Row]) -> Figure:
    """Draw useful and padded tokens, and KV used and reserved, over the steps of the run with 16 places."""
    figure, (left, right) = panels(9, 3.4, 1, 2)
    row = next(row for row in rows if "per_step" in row)
    numbers = range(1, len(row["per_step"]) + 1)
    stacks = [[step[key] for step in row["per_step"]] for key in ("useful", "padded")]
    left.stackplot(numbers, *stacks, labels=["tokens", "padding"], colors=["C0", "C3"])
    left.set(xlabel="step", ylabel="places in the tensors", yscale="symlog", title="What went through the model")
    left.legend()
    right.axhline(row["kv_reserved"] / 2**20, color="0.5", label="reserved")
    used = [step["kv_used"] / 2**20 for step in row["per_step"]]
    right.fill_between(numbers, used, color="C2", label="used")
    right.set(xlabel="step", ylabel="MiB", title="KV memory")
    right.legend(loc="center right")
    return figure


def walls(rows: list[Row]) -> Figure:
    """Draw first token and end of each request, in m1 and in m2."""
    figure, axes = panels(9, 3.4, 1, 2, sharey=True)
    titles = {"m1": "m1: one after the other", "m2": "m2: together"}
    for axis, (milestone, title) in zip(axes, titles.items(), strict=True):
        first = [row[f"{milestone}_ttft"] for row in rows]
        rest = [row[f"{milestone}_latency"] - row[f"{milestone}_ttft"] for row in rows]
        numbers = [row["request"] for row in rows]
        axis.barh(numbers, first, color="0.75", label="until the first token")
        axis.barh(numbers, rest, left=first, color="C0", label="until complete")
        axis.set(title=title, xlabel="seconds after arrival")
        axis.set_xlim(0, max(row["m1_latency"] for row in rows) * 1.03)
    axes[0].set_ylabel("request")
    axes[0].invert_yaxis()
    axes[0].legend(loc="upper right")
    return figure


PLOTS = {f"m2_{draw.__name__}": (draw.__name__, draw) for draw in (timeline, throughput, limits, padding, walls)}
