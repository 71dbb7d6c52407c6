"""The trace that the page of milestone 2 explains.

Prompts of 9, 3 and 5 tokens make a step of 17 tokens, then one of 3; one of them ends, and a prompt of 12 tokens joins
the other two: a step of 14. Times and probabilities are left out.
"""

from benchmarks.traces import Decisions, stepped
from m1_single_request.events import StepDone
from m1_single_request.output_events import Sampled
from m2_continuous_batching import LLMEngine, SamplingParams, SchedulerConfig

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
REQUESTS = {
    "nine": ("A KV cache keeps the attention keys and values", 4),
    "three": ("A token is", 2),
    "five": ("Decode is the phase", 3),
    "twelve": ("Decode is the phase after the prefill: the model normally", 2),
}
"""Prompt and `max_tokens` of each request. Its name is the number of its prompt tokens; `twelve` comes after step 2."""


def traced_steps() -> str:
    """Return the verbose console of the four requests."""
    decisions = Decisions(hidden=(Sampled, StepDone))
    asked = [(rid, prompt, SamplingParams(max_tokens=number)) for rid, (prompt, number) in REQUESTS.items()]
    with LLMEngine(scheduler_config=LIMITS) as engine:
        engine.tracer.attach(decisions)
        for _ in stepped(engine, {1: asked[:3], 3: asked[3:]}):
            pass
    return decisions.text()
