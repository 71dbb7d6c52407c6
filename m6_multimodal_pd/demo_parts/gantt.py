"""Two charts on one scale: when each request had its first token and its last one, in one engine and in a group.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.outputs import RequestMetrics, RequestOutput

WIDTH = 56
"""Columns of a chart."""


def show_charts(sides: Mapping[str, Sequence[RequestOutput]], console: Console) -> None:
    """A chart for each side."""
    total = max(map(duration, sides.values()))
    for name, outputs in sides.items():
        console.print(Text(name, style="bold"))
        console.print(chart(outputs, total))
    console.print(Text("░ until the first token   █ until the last one", style="dim"))


def duration(outputs: Sequence[RequestOutput]) -> float:
    """Seconds from the first arrival to the last end."""
    begin = min(output.metrics.arrival_time for output in outputs)
    return max((output.metrics.finished_time or begin) - begin for output in outputs)


def chart(outputs: Sequence[RequestOutput], total: float) -> Table:
    """A bar for each request, from its arrival to its end; `total`: the seconds of the whole width."""
    begin = min(output.metrics.arrival_time for output in outputs)
    table = Table.grid(padding=(0, 1, 0, 0))
    for output in outputs:
        table.add_row(output.request_id, Text(bar(output.metrics, begin, max(total, 1e-9))))
    table.add_row("", Text(f"0{f'{total * 1e3:.0f} ms':>{WIDTH - 1}}", style="dim"))
    return table


def bar(metrics: RequestMetrics, begin: float, total: float) -> str:
    """One of them."""

    def column(at: float | None) -> int:
        return round(WIDTH * ((metrics.arrival_time if at is None else at) - begin) / total)

    arrival, first, last = column(None), column(metrics.first_token_time), column(metrics.finished_time)
    return " " * arrival + "░" * (first - arrival) + "█" * max(last - first, 1)
