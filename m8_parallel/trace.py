"""One trace of all ranks: each has a stream of its own, and the Chrome trace shows them as processes.

A JSONL file is written per rank, as `NAME.rank-1.jsonl` beside the one of rank 0. For the Chrome trace rank 0 gets the
others' events when the engine is closed, with a bar for each collective: where ranks wait for each other, bars of
different lengths end at the same time. Clocks of several hosts differ, so each rank's times are shifted by what its
clock shows when all have met.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from m1_single_request.config import TraceConfig
from m1_single_request.trace_readers import PROCESS, ChromeTraceReader
from m1_single_request.tracer import TraceRecord
from m8_parallel.events import Collectives
from m8_parallel.ranks import Ranks

LANE = ("collectives", False)


class RanksTraceReader(ChromeTraceReader):
    """The Chrome trace of a rank, and on rank 0 of all. `read` also draws collectives, `collect` brings all together,
    and `close` writes all."""

    def __init__(self, path: str | Path) -> None:
        """`path`: of the file that rank 0 writes."""
        super().__init__(path)
        self.others: list[dict[str, Any]] = []
        self.zero = 0.0
        """What the clock of this rank showed when all had met, in seconds."""

    def read(self, record: TraceRecord) -> None:
        """Also draw a bar for each collective."""
        super().read(record)
        if isinstance(record.event, Collectives):
            for call in record.event.calls():
                entry = {"ph": "X", "name": call.kind, "ts": call.began * 1e6, "dur": call.seconds * 1e6}
                self._add(LANE, args={"bytes": call.num_bytes}, **entry)

    def meet(self, ranks: Ranks) -> None:
        """Look at the clock when all ranks do."""
        ranks.meet()
        ranks.smallest(0.0)
        self.zero = time.perf_counter()

    def collect(self, ranks: Ranks) -> None:
        """Bring the events of all ranks to rank 0. Every rank calls this."""
        own = json.dumps({"zero": self.zero, "events": self._named(ranks.rank)}).encode()
        for part in ranks.gather_bytes(own)[1:]:
            found = json.loads(part)
            for entry in found["events"]:
                if "ts" in entry:
                    entry["ts"] += (self.zero - found["zero"]) * 1e6
                self.others.append(entry)

    def close(self) -> None:
        """Write the file."""
        json.dump({"traceEvents": self._named(0) + self.others, "displayTimeUnit": "ms"}, self._file)
        self._file.close()

    def _named(self, rank: int) -> list[dict[str, Any]]:
        """Return the events of this rank, a process of its number."""
        names = [{"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}}]
        names += [
            {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
            for (name, _), tid in self._lanes.items()
        ]
        return [entry | {"pid": PROCESS + rank} for entry in names + self._events]


def trace_of_rank(config: TraceConfig, rank: int, size: int) -> TraceConfig:
    """Return the trace of a rank: files of its own, and the console on rank 0 alone. The readers of a program are on
    every rank, as the program is."""
    if size == 1:
        return config
    chrome, readers = config.chrome, config.readers
    if chrome is not None:
        readers = (*readers, RanksTraceReader(os.devnull if rank else chrome))
    if not rank:
        return replace(config, chrome=None, readers=readers)
    jsonl = None if config.jsonl is None else Path(config.jsonl).with_suffix(f".rank-{rank}.jsonl")
    return replace(config, console="off", jsonl=jsonl, chrome=None, player=None, readers=readers)
