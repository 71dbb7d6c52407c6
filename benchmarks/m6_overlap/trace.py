"""The trace that part 3 of the page of milestone 6 explains.

*ann* and *bob* ask at the same time. Her answer ends with a stop token, which no step can foresee; his ends by its
length. Written are the decisions of all steps, without times, and the outputs of each call.
"""

import re
import textwrap
from typing import Any

from benchmarks.engines import TEXT_MODEL
from benchmarks.texts import message
from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig

CONFIGS: dict[str, Any] = {
    "model_config": ModelConfig(model=TEXT_MODEL, max_model_len=128, device="cpu"),
    "cache_config": CacheConfig(page_size=4, max_total_tokens=256),
    "scheduler_config": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, enable_overlap=True),
}
KEEPS = 2389
"""The token ' keeps', the fourth one of her answer."""
QUESTIONS = {
    "ann": ("What is a KV cache?", SamplingParams(max_tokens=8, stop_token_ids=[KEEPS])),
    "bob": ("What is prefill?", SamplingParams(max_tokens=6, ignore_eos=True)),
}
WRITTEN = ("batch", "step_launched", "step_arrived", "duplicates_freed", "released", "result", "finish")
"""Kinds of events."""
TIME = re.compile(r"[\d.]+ ms")


class Followed(TraceReader):
    """A trace reader that writes one paragraph for each event, after the number of its step."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def read(self, record: TraceRecord) -> None:
        """Keep an event of these kinds."""
        if record.event.kind in WRITTEN:
            self.add(f"step {record.step}", TIME.sub("… ms", record.event.explain()))

    def add(self, who: str, text: str) -> None:
        """Write a text, and its source before it."""
        self.lines += textwrap.wrap(f"{who:<8}{text}", 84, subsequent_indent=" " * 8)


def traced_steps() -> str:
    """Return the events of the two requests, call by call."""
    followed = Followed()
    with LLMEngine(**CONFIGS, trace_config=TraceConfig(readers=(followed,))) as engine:
        for rid, (question, params) in QUESTIONS.items():
            engine.add_request(engine.chat_prompt([message(question)]), params, request_id=rid)
        call, texts = 0, dict.fromkeys(QUESTIONS, "")
        while engine.has_unfinished_requests():
            call += 1
            found = {rid: output.text for rid, output in engine.step().items()}
            new = [f"{rid} {text.removeprefix(texts[rid])!r}" for rid, text in sorted(found.items())]
            texts |= found
            followed.add(f"call {call}", f"returns {', '.join(new) or 'nothing'}")
            followed.lines.append("")
    return "\n".join(followed.lines).strip("\n") + "\n"
