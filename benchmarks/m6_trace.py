"""Writes the trace that the page of milestone 6 explains, and its pictures: `python -m benchmarks.m6_trace`.

A step has 20 tokens, of which the tower may make 12. While *ann* is being answered *bob* shows two pictures of nine
tokens each: his prompt is cut in front of the second. When he is done *cat* shows his first picture behind another
text, and is cut inside it; then *bob* asks again about both. Pages have 4 tokens. Times, probabilities, the choice of
kernels and the bookkeeping of the tree are left out, so the same versions write the same
`results/m6_multimodal_trace.txt` on every machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from rich.console import Console

from benchmarks import RESULTS
from benchmarks.m3_trace import Decisions
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

MODEL = ModelConfig(max_model_len=128, device="cpu")
MEMORY = CacheConfig(page_size=4, max_total_tokens=256)
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20)
PICTURES = MultimodalConfig(encoder_budget=12)
STAR = draw_scene(Random(1), [Thing("big", "red", "star", "left")]).pixels
CIRCLE = draw_scene(Random(2), [Thing("big", "blue", "circle", "right")]).pixels
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def image(pixels: Any) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image", "image": pixels}


def text(words: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": words}


FOUND, SECOND = "Here is what I have found in a book: ", "Describe the second picture."
TWO = {"role": "user", "content": [image(STAR), image(CIRCLE), text("What changed?")]}
ARRIVALS = {
    1: ("ann", [{"role": "user", "content": "What is a KV cache?"}]),
    2: ("bob", [TWO]),
    7: ("cat", [{"role": "user", "content": [text(FOUND), image(STAR), text("What color is the star?")]}]),
    11: ("bob again", [TWO, {"role": "assistant", "content": "The shape."}, {"role": "user", "content": SECOND}]),
}
"""By the step before which they come: id and conversation."""


class Untimed(EncoderRun):
    """A run of the tower, without its time."""

    def explain(self) -> str:
        return super().explain().rpartition(",")[0] + "."


class SeenDecisions(Decisions):
    """The console's text about decisions and pictures: without times, and without the bookkeeping of the tree."""

    def read(self, record: TraceRecord) -> None:
        """Pass on what is the same on every machine."""
        event = record.event
        if isinstance(event, EncoderRun):
            record = replace(record, event=Untimed(**vars(event)))
        if isinstance(event, PositionsAssigned) or not event.detail:
            super().read(record)


def steps(*readers: TraceReader) -> Iterator[LLMEngine]:
    """Serve the requests while the readers listen; yields the engine after every step."""
    with LLMEngine(
        model_config=MODEL,
        cache_config=MEMORY,
        scheduler_config=LIMITS,
        multimodal_config=PICTURES,
        trace_config=TraceConfig(readers=readers),
    ) as engine:
        step = 0
        while engine.has_unfinished_requests() or step < max(ARRIVALS):
            step += 1
            if step in ARRIVALS:
                rid, messages = ARRIVALS[step]
                engine.add_request(engine.chat_prompt(messages), PARAMS, request_id=rid)
            engine.step()
            yield engine


def traced_steps() -> str:
    """What the console says of the requests."""
    decisions = SeenDecisions()
    for _ in steps(decisions):
        pass
    lines = decisions.text.getvalue().strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    """Write the file and the pictures, and print the trace."""
    from benchmarks.m6_pictures import draw_pictures  # needs matplotlib

    written = traced_steps()
    (RESULTS / "m6_multimodal_trace.txt").write_text(written, encoding="utf-8")
    draw_pictures()
    Console().print(written, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
