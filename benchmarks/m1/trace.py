"""The trace that the page of milestone 1 explains: the verbose console of a short answer, without the times."""

from benchmarks.traces import Decisions
from m1_single_request import LLMEngine, SamplingParams
from m1_single_request.events import StepDone

QUESTION = "What is a KV cache?"


def traced_steps() -> str:
    """Return the console of one answer."""
    decisions = Decisions(hidden=(StepDone,))
    with LLMEngine() as engine:
        engine.tracer.attach(decisions)
        engine.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=3), request_id="req-0")
    return decisions.text()
