"""What the demo remembers of the trace: what the vision tower did, and how full the steps were.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

from typing import Any

from m1_single_request.tracer import TraceRecord
from m5_chunked_prefill_spec.events import Batch
from m6_multimodal_pd.events import EncoderRun, ItemReceived, PositionsAssigned


class Notes:
    """A trace reader for the tour."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Batch]] = []
        self.runs: list[EncoderRun] = []
        self.modality: dict[str, str] = {}
        """`image` or `video`, by content."""
        self.items: dict[str, ItemReceived] = {}
        """The first picture of each request, by request id; several answers have one prompt."""
        self.positions: dict[str, PositionsAssigned] = {}
        """Positions of each prompt, by request id."""

    def read(self, record: TraceRecord) -> None:
        """Keep what is of interest."""
        event: Any = record.event
        if isinstance(event, Batch):
            self.batches.append((record.step, event))
        elif isinstance(event, EncoderRun):
            self.runs.append(event)
        elif isinstance(event, ItemReceived):
            self.modality[event.hash] = event.modality
            self.items.setdefault(event.rid.partition("/")[0], event)
        elif isinstance(event, PositionsAssigned):
            self.positions.setdefault(event.rid.partition("/")[0], event)

    def close(self) -> None:
        """Nothing to do."""
