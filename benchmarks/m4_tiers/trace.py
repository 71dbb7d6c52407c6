"""The traces that the pages about tiers and about priorities explain.

The first: *ann* asks, *eve* needs the memory, and *ann* goes on with the chat, most of which is in host memory. The
second: *zoe* is urgent, takes the place of *ann*, and *ann* resumes. Pages have 4 tokens, the device 72. Times,
probabilities and the choice of kernels are left out, and so are the ends of copies, whose sentences have times.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks.traces import MACHINE_DEPENDENT, Decisions, written
from m1_single_request.tracer import TraceReader
from m3_paged_attention.events import KVSized
from m4_radix_cache import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig
from m4_radix_cache.mem_cache.events import CacheFlushed
from m4_radix_cache.mem_cache.host_events import Acknowledged

MODEL = ModelConfig(max_model_len=80)
MEMORY = CacheConfig(page_size=4, max_total_tokens=72, host_memory_bytes=2**20)
ARRIVALS = SchedulerConfig(max_num_seqs=4, schedule_policy="fcfs")
PRIORITIES = SchedulerConfig(max_num_seqs=4, schedule_policy="priority", priority_preemption=True)
ASKED = (
    "You answer questions about LLM inference. The keys and values of all earlier tokens are kept in pages. "
    "What is a page?"
)
OTHER = "Prefill runs the whole prompt through the model in one pass. Decode adds one token per step. " * 2
CHAT = (("ann-1", ASKED, 2, 0, 1), ("eve", OTHER, 2, 0, 3), ("ann-2", "{ann-1} And a block?", 2, 0, 5))
URGENT = (("ann", ASKED, 8, 0, 1), ("zoe", OTHER, 2, 20, 4))
"""Requests: id, text, maximum of new tokens, priority, and the step before which they arrive. A name in braces stands
for the tokens of that request, its answer included."""
Arrival = tuple[str, str, int, int, int]


def run(arrivals: Sequence[Arrival], limits: SchedulerConfig, *readers: TraceReader) -> None:
    """Serve requests with these readers."""
    trace, tokens, step = TraceConfig(readers=readers), dict[str, list[int]](), 0
    with LLMEngine(model_config=MODEL, cache_config=MEMORY, scheduler_config=limits, trace_config=trace) as engine:
        tokenizer = engine.engine_core.input_processor.tokenizer
        while step < arrivals[-1][-1] or engine.has_unfinished_requests():
            step += 1
            for rid, text, max_tokens, priority, at in arrivals:
                if at == step:
                    before, _, rest = text[1:].partition("}") if text.startswith("{") else ("", "", text)
                    prompt = tokens.get(before, []) + tokenizer(rest, add_special_tokens=False)["input_ids"]
                    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                    engine.add_request(prompt, params, request_id=rid, priority=priority)
            for rid, output in engine.step().items():
                tokens[rid] = [*output.prompt_token_ids, *output.token_ids]


PARTS = {"chat": partial(run, CHAT, ARRIVALS), "urgent": partial(run, URGENT, PRIORITIES)}


def traced_steps() -> str:
    """Return the console of both runs, each as a section that a page includes."""
    hidden = (*MACHINE_DEPENDENT, KVSized, Acknowledged, CacheFlushed)
    sections = (
        f"# --8<-- [start:{name}]\n{written(served, Decisions(hidden=hidden))}# --8<-- [end:{name}]\n"
        for name, served in PARTS.items()
    )
    return "\n".join(sections)
