"""The trace that part 2 of the page of milestone 6 explains.

A prefill engine and a decode engine in one process, in turns. *ann* comes first, and with her the two engines meet;
then *bob*, whose prompt has a picture and more tokens than a step; then *bob again*, with a second turn. Written are
the events of the two bobs, without times and without the bookkeeping of the tree.
"""

import re
import textwrap

from benchmarks.m6.trace import CONFIGS, PARAMS, STAR
from benchmarks.texts import message
from benchmarks.traces import stepped
from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd import DisaggregationConfig, LLMEngine, TraceConfig
from m6_multimodal_pd.disaggregation.events import Reported

SHOWN = message("Look at this picture: ", STAR, "What color is the star?")
CONVERSATIONS = {
    "ann": [message("What is a KV cache?")],
    "bob": [SHOWN],
    "bob again": [SHOWN, message("Red.", role="assistant"), message("What is at the left?")],
}
REPORTED = (
    "room_taken",
    "kv_poll_changed",
    "chunked",
    "batch",
    "encoder_run",
    "chunk_sent",
    "chunk_received",
    "result",
    "finish",
)
"""Events of the engines that are written."""
TIMES = re.compile(r",? in [\d.]+ ms( \([\d.]+ GB/s\))?")


class Followed(TraceReader):
    """A trace reader of some requests: a line for each event, with the engine that it comes from."""

    def __init__(self, *rids: str) -> None:
        self.rids = set(rids)
        self.lines: list[str] = []

    def read(self, record: TraceRecord) -> None:
        """Keep an event of these requests."""
        event = record.event
        if isinstance(event, Reported):
            again = event.engine.startswith("decode") and event.what in ("result", "finish")  # the router has it, too
            if event.what in REPORTED and not again and set(event.rids) & self.rids:
                self._add(event.engine, event.text)
        elif event.kind in ("request_routed", "result", "finish") and set(event.request_ids()) & self.rids:
            self._add("router", event.explain())

    def _add(self, engine: str, text: str) -> None:
        self.lines += textwrap.wrap(f"{engine:<10}{TIMES.sub('', text)}", 84, subsequent_indent=" " * 10)


def traced_steps() -> str:
    """Return the events of the two bobs in a group of engines."""
    followed = Followed("bob", "bob again")
    group, trace = DisaggregationConfig(transport="in_process"), TraceConfig(readers=(followed,))
    with LLMEngine(**CONFIGS, disaggregation_config=group, trace_config=trace) as engine:
        for rid, messages in CONVERSATIONS.items():
            if followed.lines:
                followed.lines.append("")
            for _ in stepped(engine, {1: [(rid, messages, PARAMS)]}):
                pass
    return "\n".join(followed.lines) + "\n"
