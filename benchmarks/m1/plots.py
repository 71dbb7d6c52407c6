"""The plots of lesson 1."""

from matplotlib.figure import Figure

from benchmarks.plots import Row, lines, panels, roof


def walls(token_at: list[Row], queue: list[Row]) -> Figure:
    """Draw the next token with and without a cache, and the waiting time of queued requests."""
    figure, (left, right) = panels(9, 3.4, 1, 2)
    series = {"read all again": "recompute", "KV cache": "cache"}
    milliseconds = {label: [row[key] * 1e3 for row in token_at] for label, key in series.items()}
    lines(left, [row["tokens"] for row in token_at], milliseconds, ("C0", "C1"), title="One more token")
    left.set(xlabel="tokens so far", ylabel="ms for the next token")
    left.legend()
    numbers, waited = [row["request"] for row in queue], [row["waited"] * 1e3 for row in queue]
    right.bar(numbers, waited, color="0.75", label="waiting for those before")
    own = [(row["ttft"] - row["waited"]) * 1e3 for row in queue]
    right.bar(numbers, own, bottom=waited, color="C1", label="own prefill")
    right.set(xlabel="request", ylabel="TTFT in ms", title=f"{len(queue)} requests, one at a time")
    right.legend()
    return figure


def measured(first: list[Row], following: list[Row], part: Row) -> Figure:
    """Draw prefill and decode by length, and the roofline."""
    figure, (left, right) = panels(9, 3.6, 1, 2)
    series = {
        "TTFT, prompt of n": [row["ttft"] * 1e3 for row in first],
        "TPOT, context of n": [row["tpot"] * 1e3 for row in following],
    }
    lines(left, [row["tokens"] for row in first], series, ("C1", "C0"), xscale="log", yscale="log")
    left.set(xlabel="n tokens", ylabel="ms", title="Prefill and decode")
    left.legend()
    kinds = {"prefill": ("o", "C1", "prefill"), "decode": ("s", "C0", "decode")}
    roof(right, part, kinds, (0.1, 2000), numbered=False)
    right.set_title("Roofline of this machine")
    return figure


PLOTS = {"m1_walls": ("token_at queue", walls), "m1_measured": ("first_token next_token roofline", measured)}
