"""The trace that the page of milestone 5 explains.

A step has 16 tokens. *ann* asks for a text to be repeated: her prompt of 27 tokens is cut, and her answer is guessed
from the prompt. While it runs *bob* comes with a longer prompt, whose pieces run beside her tokens and her guesses.
Pages have 4 tokens. Times, probabilities and the choice of kernels are left out.
"""

from collections.abc import Iterator

from benchmarks.traces import stepped, written
from m1_single_request.tracer import TraceReader
from m5_chunked_prefill_spec import (
    CacheConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    TraceConfig,
)

MODEL = ModelConfig(max_model_len=96)
MEMORY = CacheConfig(page_size=4, max_total_tokens=96, debug=True)
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
GUESSES = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
ARRIVALS = {
    1: ("ann", "Repeat this text:\nsee a green lamp and a green bird"),
    4: ("bob", "The code of goat is 6706. The code of lamp is 1234. What is the code of goat?"),
}
"""By the step before which they come: id and question."""
PARAMS = SamplingParams(max_tokens=12)


def steps(*readers: TraceReader) -> Iterator[LLMEngine]:
    """Serve the requests with these readers; yields the engine after every step."""
    with LLMEngine(
        model_config=MODEL,
        cache_config=MEMORY,
        scheduler_config=LIMITS,
        speculative_config=GUESSES,
        trace_config=TraceConfig(readers=readers),
    ) as engine:
        asked = {step: [(rid, [{"role": "user", "content": text}], PARAMS)] for step, (rid, text) in ARRIVALS.items()}
        for _ in stepped(engine, asked):
            yield engine


def traced_steps() -> str:
    """Return the console of the requests."""
    return written(lambda decisions: list(steps(decisions)))
