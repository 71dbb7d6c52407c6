"""The trace that the page of milestone 3 explains.

Two prompts in eight blocks of four tokens. One of them asks for two continuations, so there is a fork, and where the
two part a copy on write. In step 5 two requests need a new block and one is free: a request is preempted, and comes
back in step 7. Times, probabilities and the choice of kernels are left out.
"""

from benchmarks.traces import stepped, written
from m1_single_request.tracer import TraceReader
from m3_paged_attention import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig

MODEL = ModelConfig(max_model_len=32)
MEMORY = CacheConfig(block_size=4, num_blocks=8)
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
REQUESTS = {
    "nine": ("A KV cache keeps the attention keys and values", SamplingParams(max_tokens=6)),
    "six": (
        "A scheduler chooses which requests",
        SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True),
    ),
}
"""Prompt and parameters of each request. Its name is the number of its prompt tokens."""


def run(*readers: TraceReader) -> None:
    """Serve the two requests with these readers."""
    trace = TraceConfig(readers=readers)
    with LLMEngine(model_config=MODEL, cache_config=MEMORY, scheduler_config=LIMITS, trace_config=trace) as engine:
        for _ in stepped(engine, {1: [(rid, *asked) for rid, asked in REQUESTS.items()]}):
            pass


def traced_steps() -> str:
    """Return the console of the two requests."""
    return written(run)
