"""The trace that the page of milestone 4 explains.

Two users of one system prompt arrive together: the first computes it, the second waits a round and finds it. Then the
first one goes on with the conversation, and finds prompt and answer of the first turn. At last a request comes that
shares nothing: there is too little room, so a leaf of the tree is evicted. Pages have 4 tokens, the memory 72. Times,
probabilities and the choice of kernels are left out.
"""

from benchmarks.traces import written
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
    """Serve the requests with these readers."""
    trace = TraceConfig(readers=readers)
    tokens: dict[str, list[int]] = {}
    with LLMEngine(model_config=MODEL, cache_config=MEMORY, scheduler_config=LIMITS, trace_config=trace) as engine:
        tokenizer = engine.engine_core.input_processor.tokenizer
        for turn in TURNS:
            for rid, text in turn.items():
                before, _, rest = text[1:].partition("}") if text.startswith("{") else ("", "", text)
                prompt = tokens.get(before, []) + tokenizer(rest, add_special_tokens=False)["input_ids"]
                engine.add_request(prompt, PARAMS, request_id=rid)
            while engine.has_unfinished_requests():
                for rid, output in engine.step().items():
                    tokens[rid] = [*output.prompt_token_ids, *output.token_ids]


def traced_steps() -> str:
    """Return the console of the requests."""
    return written(run)
