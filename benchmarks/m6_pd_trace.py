"""Writes the trace that part 2 of the page of milestone 6 explains: `python -m benchmarks.m6_pd_trace`.

A prefill engine and a decode engine in one process, in turns, so that the same versions write the same
`results/m6_pd_trace.txt` on every machine. Pages have 4 tokens, a step 20. *ann* comes first, and with her the two
engines meet; then *bob*, whose prompt has a picture and more tokens than a step; then *bob again*, with a second turn.
The file has what the router and the engines say of the two bobs, without times and without the bookkeeping of the tree.
"""

import re

from rich.console import Console

from benchmarks import RESULTS
from benchmarks.m6_trace import STAR, image, text
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd import (
    CacheConfig,
    DisaggregationConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from m6_multimodal_pd.disaggregation.events import Reported

MODEL = ModelConfig(max_model_len=128, device="cpu")
MEMORY = CacheConfig(page_size=4, max_total_tokens=256)
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20)
GROUP = DisaggregationConfig(transport="in_process")
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
SHOWN = {"role": "user", "content": [text("Look at this picture: "), image(STAR), text("What color is the star?")]}
CONVERSATIONS = {
    "ann": [{"role": "user", "content": "What is a KV cache?"}],
    "bob": [SHOWN],
    "bob again": [SHOWN, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "What is at the left?"}],
}
TOLD = (
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
"""What of the engines' events is passed on."""
TIMES = re.compile(r",? in [\d.]+ ms( \([\d.]+ GB/s\))?")


class Followed:
    """A trace reader: what is said of some requests, a line each, by whom."""

    def __init__(self, *rids: str) -> None:
        self.rids = rids
        self.lines: list[str] = []

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if isinstance(event, Reported):
            again = event.engine.startswith("decode") and event.what in ("result", "finish")  # the router says it, too
            if event.what in TOLD and not again and set(event.rids) & set(self.rids):
                self._say(event.engine, event.text)
        elif event.kind in ("request_routed", "result", "finish") and set(event.request_ids()) & set(self.rids):
            self._say("router", event.explain())

    def _say(self, who: str, said: str) -> None:
        self.lines.append(f"{who:<10}{TIMES.sub('', said)}")

    def close(self) -> None:
        """Nothing to let go of."""


def traced() -> str:
    """What is said of the two bobs."""
    followed = Followed("bob", "bob again")
    with LLMEngine(
        model_config=MODEL,
        cache_config=MEMORY,
        scheduler_config=LIMITS,
        disaggregation_config=GROUP,
        trace_config=TraceConfig(readers=(followed,)),
    ) as engine:
        for rid, messages in CONVERSATIONS.items():
            if followed.lines:
                followed.lines.append("")
            engine.add_request(engine.chat_prompt(messages), PARAMS, request_id=rid)
            while engine.has_unfinished_requests():
                engine.step()
    return "\n".join(followed.lines) + "\n"


def main() -> int:
    """Write the file, and print it."""
    written = traced()
    (RESULTS / "m6_pd_trace.txt").write_text(written, encoding="utf-8")
    Console().print(written, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
