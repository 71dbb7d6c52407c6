"""Writes the trace that the page of milestone 4 explains, and its pictures: `python -m benchmarks.m4_trace`.

Two users of one system prompt arrive together: the first computes it, the second waits a round and finds it. Then the
first one goes on with the conversation, and finds prompt and answer of the first turn. At last somebody comes with whom
nobody shares anything: there is too little room, so a leaf of the tree is evicted. Pages have 4 tokens, the memory 72.
Times, probabilities and the choice of kernels are left out, so every machine writes the same
`results/m4_radix_cache_trace.txt`.
"""

from rich.console import Console

from benchmarks import RESULTS
from benchmarks.m3_trace import Decisions
from m1_single_request.tracer import TraceReader
from m4_radix_cache import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig

MODEL = ModelConfig(max_model_len=80)
MEMORY = CacheConfig(page_size=4, max_total_tokens=72, debug=True)
LIMITS = SchedulerConfig(max_num_seqs=4)
SYSTEM = (
    "You answer questions about LLM inference. The keys and values of all earlier tokens are kept in KV memory, in "
    "pages of a fixed size."
)
TURNS = (
    {"ann-1": f"{SYSTEM} What is a page?", "bob-1": f"{SYSTEM} What is prefill?"},
    {"ann-2": "{ann-1} And a block?"},
    {"eve-1": "Prefill runs the whole prompt through the model in one pass. Decode adds one token per step."},
)
"""Requests that arrive together, by id. A name in braces stands for the tokens of that request, its answer included."""
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def run(*readers: TraceReader) -> None:
    """Serve the requests while the readers listen."""
    trace = TraceConfig(readers=readers)
    said: dict[str, list[int]] = {}
    with LLMEngine(model_config=MODEL, cache_config=MEMORY, scheduler_config=LIMITS, trace_config=trace) as engine:
        tokenizer = engine.engine_core.input_processor.tokenizer
        for turn in TURNS:
            for rid, text in turn.items():
                before, _, rest = text[1:].partition("}") if text.startswith("{") else ("", "", text)
                prompt = said.get(before, []) + tokenizer(rest, add_special_tokens=False)["input_ids"]
                engine.add_request(prompt, PARAMS, request_id=rid)
            while engine.has_unfinished_requests():
                for rid, output in engine.step().items():
                    said[rid] = [*output.prompt_token_ids, *output.token_ids]


def traced_steps() -> str:
    """What the console says of the requests."""
    decisions = Decisions()
    run(decisions)
    return "\n".join(line.rstrip() for line in decisions.text.getvalue().strip("\n").splitlines()) + "\n"


def main() -> int:
    """Write the file and the pictures, and print the trace."""
    from benchmarks.m4_pictures import draw_pictures  # needs matplotlib

    text = traced_steps()
    (RESULTS / "m4_radix_cache_trace.txt").write_text(text, encoding="utf-8")
    draw_pictures()
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
