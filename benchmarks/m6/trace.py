"""The trace that part 1 of the page of milestone 6 explains.

A step has 20 tokens, of which the tower may make 12. While *ann* is being answered *bob* shows two pictures of nine
tokens each: his prompt is cut in front of the second. When he is done *cat* shows his first picture behind another
text, and is cut inside it; then *bob* asks again about both. Pages have 4 tokens. Times, probabilities, the choice of
kernels and the bookkeeping of the tree are left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from benchmarks.texts import message
from benchmarks.traces import Decisions, stepped, written
from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd import (
    CacheConfig,
    LLMEngine,
    ModelConfig,
    MultimodalConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from m6_multimodal_pd.events import EncoderRun, PositionsAssigned
from training.scenes import Thing, draw_scene

CONFIGS: dict[str, Any] = {
    "model_config": ModelConfig(max_model_len=128, device="cpu"),
    "cache_config": CacheConfig(page_size=4, max_total_tokens=256),
    "scheduler_config": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20),
}
PICTURES = MultimodalConfig(encoder_budget=12)
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
STAR = draw_scene(Random(1), [Thing("big", "red", "star", "left")]).pixels
CIRCLE = draw_scene(Random(2), [Thing("big", "blue", "circle", "right")]).pixels


TWO = message(STAR, CIRCLE, "What changed?")
ARRIVALS = {
    1: ("ann", [message("What is a KV cache?")]),
    2: ("bob", [TWO]),
    7: ("cat", [message("Here is what I have found in a book: ", STAR, "What color is the star?")]),
    11: ("bob again", [TWO, message("The shape.", role="assistant"), message("Describe the second picture.")]),
}
"""By the step before which they come: id and conversation."""


class Untimed(EncoderRun):
    """A run of the tower, without its time."""

    def explain(self) -> str:
        """Return the sentence of the event up to the time."""
        return super().explain().rpartition(",")[0] + "."


class SeenDecisions(Decisions):
    """The console's text about decisions and pictures: without times, and without the bookkeeping of the tree."""

    def read(self, record: TraceRecord) -> None:
        """Pass on an event that is the same on every machine."""
        event = record.event
        if isinstance(event, EncoderRun):
            record = replace(record, event=Untimed(**vars(event)))
        if isinstance(event, PositionsAssigned) or not event.detail:
            super().read(record)


def steps(*readers: TraceReader) -> Iterator[LLMEngine]:
    """Serve the requests with these readers; yields the engine after every step."""
    trace = TraceConfig(readers=readers)
    with LLMEngine(**CONFIGS, multimodal_config=PICTURES, trace_config=trace) as engine:
        for _ in stepped(engine, {step: [(*asked, PARAMS)] for step, asked in ARRIVALS.items()}):
            yield engine


def traced_steps() -> str:
    """Return the console of the requests."""
    return written(lambda decisions: list(steps(decisions)), SeenDecisions())
