"""Expert map: which experts the tokens of each step have used, in a grid of layers and experts, from the trace.

    step 1: 18 tokens used 33 of 48 experts (1.2 MiB); the busiest 4.3 times the mean
      layer   0  +22..112..34..1+5.62+233  17 read
      layer   2  1.+232.354.41614.514....  16 read

Attach it with `TraceConfig(experts=True, readers=(view,))`. It shows how uneven a batch is, and how many weights a
step reads: of one request few experts, of many requests nearly all. The engines of a group (m6) report the same numbers
as another event, `Reported`, which this view does not read. vLLM and SGLang write such counts to files.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from m1_single_request.trace_event import size, some
from m1_single_request.trace_readers import OpenSteps
from m1_single_request.tracer import TraceReader, TraceRecord
from m3_paged_attention.expert_events import ExpertsUsed

KEY = "A row is a layer, a character an expert: the number of its tokens, . for none and + for more than nine."
SHADES = ("dim", "green", "yellow", "bold red")
"""Colours of an expert: without a token; up to the mean, up to twice the mean, more."""


@dataclass(frozen=True)
class Frame:
    """The experts of one step."""

    step: int
    used: ExpertsUsed

    @property
    def unevenness(self) -> float:
        """The largest load of an expert, in units of the mean: 1 if all experts have equally many tokens."""
        return max(self.used.loads) / self.used.mean_load

    def rows(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the index of each sparse layer, and the tokens of its experts."""
        for place, layer in enumerate(self.used.layers):
            yield layer, self.used.loads[place * self.used.num_experts :][: self.used.num_experts]


class ExpertMap(TraceReader):
    """Trace reader that stores a frame of every step."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._used = OpenSteps[list[ExpertsUsed]](list)

    def read(self, record: TraceRecord) -> None:
        """Apply one record."""
        if isinstance(record.event, ExpertsUsed):
            self._used.of(record.step).append(record.event)
        if record.event.ends_step:
            self.frames += [Frame(record.step, used) for used in self._used.end(record.step)]


def draw(frame: Frame, width: int) -> Group:
    """Draw a frame in lines of at most `width` characters: the tokens of each expert, `+` for more than nine."""
    used, total = frame.used, len(frame.used.loads)
    title = Text.assemble(
        (f"step {frame.step}", "bold"),
        f": {some(used.num_tokens, 'token')} used {used.num_read:,} of {total:,} experts ({size(used.read_bytes)}); "
        f"the busiest {frame.unevenness:.1f} times the mean",
    )
    return Group(title, *(line for layer, row in frame.rows() for line in _row(layer, row, used.mean_load, width)))


def _row(layer: int, load: tuple[int, ...], mean: float, width: int) -> Iterator[Text]:
    """Yield the lines of a layer."""
    label, read = f"  layer {layer:>3}  ", f"  {sum(count > 0 for count in load)} read"
    each = max(1, width - len(label) - len(read))
    for first in range(0, len(load), each):
        cells = [_cell(count, mean) for count in load[first : first + each]]
        is_last = first + each >= len(load)
        yield Text.assemble((label if first == 0 else " " * len(label), "dim"), *cells, read if is_last else "")


def _cell(count: int, mean: float) -> tuple[str, str]:
    shade = 0 if count == 0 else 1 if count <= mean else 2 if count <= 2 * mean else 3
    return "." if count == 0 else str(count) if count < 10 else "+", SHADES[shade]
