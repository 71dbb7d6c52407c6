"""Writes the trace that the page of milestone 5 explains, and its pictures: `python -m benchmarks.m5_trace`.

A step has 16 tokens. *ann* wants a text said again: her prompt of 27 tokens is cut, and her answer is guessed by
looking further up. While it is on its way *bob* comes with a longer prompt, whose pieces run beside her tokens and her
guesses. Pages have 4 tokens. Times, probabilities and the choice of kernels are left out, so every machine writes the
same `results/m5_chunked_prefill_spec_trace.txt`.
"""

from collections.abc import Iterator

from rich.console import Console

from benchmarks import RESULTS
from benchmarks.m3_trace import Decisions
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
    """Serve the requests while the readers listen; yields the engine after every step."""
    with LLMEngine(
        model_config=MODEL,
        cache_config=MEMORY,
        scheduler_config=LIMITS,
        speculative_config=GUESSES,
        trace_config=TraceConfig(readers=readers),
    ) as engine:
        step = 0
        while engine.has_unfinished_requests() or not step:
            step += 1
            if step in ARRIVALS:
                rid, question = ARRIVALS[step]
                prompt = engine.chat_prompt([{"role": "user", "content": question}])
                engine.add_request(prompt, PARAMS, request_id=rid)
            engine.step()
            yield engine


def traced_steps() -> str:
    """What the console says of the requests."""
    decisions = Decisions()
    for _ in steps(decisions):
        pass
    return "\n".join(line.rstrip() for line in decisions.text.getvalue().strip("\n").splitlines()) + "\n"


def main() -> int:
    """Write the file and the pictures, and print the trace."""
    from benchmarks.m5_pictures import draw_pictures  # needs matplotlib

    text = traced_steps()
    (RESULTS / "m5_chunked_prefill_spec_trace.txt").write_text(text, encoding="utf-8")
    draw_pictures()
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
