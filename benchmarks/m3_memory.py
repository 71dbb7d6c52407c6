"""What blocks do to memory: what is reserved for nothing, what sharing saves, and what it costs when they run out.

Whatever is counted here (blocks, tokens, preemptions) is the same on every machine.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import interleaved
from benchmarks.m3_models import MAX_MODEL_LEN, TestedModel
from benchmarks.m3_workload import EngineSide, Ragged, Side, watched
from m2_continuous_batching.events import Batch, KVUsage as DenseUsage
from m3_paged_attention import CacheConfig, LLMEngine, SamplingParams
from m3_paged_attention.kv_events import BlockCopied, BlocksUsed
from m3_paged_attention.scheduler_events import Preempted

BLOCK_SIZES = (1, 4, 16, 64, 128)
NUM_CONTINUATIONS = 4
POOL_SHARE = 3  # the small pool holds so many times less than the batch takes at most
Row = dict[str, Any]
Steps = list[dict[str, int]]


# --- reserved for nothing ---------------------------------------------------------------------------------------------


def fragmentation(model: TestedModel, work: Ragged, *, max_num_seqs: int) -> Row:
    """KV tokens reserved and held in each step: m2's slots and m3's blocks, over the same requests.

    m2 counts while a step runs and m3 after it, so a request that ends in a step is in the one count only. The shortest
    slots that would do are as long as the longest request, which nobody knows in advance.
    """
    longest = max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True))
    rows: dict[str, Row] = {}
    for name, slot_len in {"shortest slots": longest, "slots": MAX_MODEL_LEN}.items():
        steps = _dense_steps(model, work, max_num_seqs, slot_len)
        rows[name] = {"layout": f"m2, slots of {slot_len:,}"} | _waste(steps)
        if name == "slots":
            rows[name]["per_step"] = steps
    for block_size in BLOCK_SIZES:
        engine = _paged(model, max_num_seqs, block_size=block_size)
        steps = _paged_steps(engine, lambda engine=engine: work.run(engine))
        rows[f"blocks of {block_size}"] = {"layout": f"m3, blocks of {block_size}"} | _waste(steps)
        if block_size == 16:
            rows["blocks of 16"]["per_step"] = steps
    return work.describe() | {"max_num_seqs": max_num_seqs, "layouts": rows}


def _paged(model: TestedModel, max_num_seqs: int, *, block_size: int = 16) -> LLMEngine:
    cache = CacheConfig(block_size=block_size, kv_cache_memory_bytes=2**30)
    return model.engine(max_num_seqs=max_num_seqs, cache=cache)


def _paged_steps(engine: LLMEngine, call: Callable[[], object]) -> Steps:
    usage: list[BlocksUsed] = watched(engine, call, BlocksUsed).events
    return [{"reserved": u.num_used * u.block_size, "held": u.tokens_held, "shared": u.num_shared} for u in usage]


def _dense_steps(model: TestedModel, work: Ragged, max_num_seqs: int, slot_len: int) -> Steps:
    """In m2 all slots are reserved from the first step to the last."""
    with model.dense_engine(max_num_seqs=max_num_seqs, max_model_len=slot_len) as engine:
        usage: list[DenseUsage] = watched(engine, lambda: work.run(engine), DenseUsage).events
        per_token = engine.engine_core.executor.worker.model_runner.kv_bytes_per_token
    return [{"reserved": u.kv_bytes_reserved // per_token, "held": u.kv_bytes_used // per_token} for u in usage]


def _waste(steps: Steps) -> Row:
    """Over all steps, and in the step that reserved most. A last step that has released everything says nothing."""
    peak = max(steps, key=lambda step: step["held"])
    reserved, held = (sum(step[key] for step in steps) for key in ("reserved", "held"))
    return {
        "unused": 1 - held / reserved,
        "unused_at_peak": 1 - peak["held"] / peak["reserved"],
        "peak_reserved": max(step["reserved"] for step in steps),
        "peak_held": peak["held"],
        "steps": len(steps),
    }


# --- too little of it -------------------------------------------------------------------------------------------------


def preemption(model: TestedModel, work: Ragged, *, max_num_seqs: int, rounds: int) -> Row:
    """The same requests with room for all, and in a pool a third as large, by recompute and by swap.

    They should have short prompts and long answers: then many are admitted, grow, and run out of blocks under way. With
    long prompts it is admission that keeps them apart, and hardly anybody is ever preempted.
    """
    roomy = _paged(model, max_num_seqs)
    peak = max(step["reserved"] for step in _paged_steps(roomy, lambda: work.run(roomy))) // 16
    pool = CacheConfig(num_blocks=peak // POOL_SHARE)
    sides = {
        "room for all": EngineSide(work, engine=roomy),
        "recompute": EngineSide(work, engine=model.engine(max_num_seqs=max_num_seqs, cache=pool)),
        "swap": EngineSide(work, engine=model.engine(max_num_seqs=max_num_seqs, cache=pool, preemption_mode="swap")),
    }
    seconds = interleaved(sides, rounds=rounds)
    rows = {name: _preempted(side, seconds[name], sides["room for all"]) for name, side in sides.items()}
    return work.describe() | {"peak_blocks": peak, "pool_blocks": peak // POOL_SHARE, "sides": rows}


def _preempted(side: EngineSide, seconds: float, roomy: Side) -> Row:
    """One more run, with a reader attached, says what went through the model and how much was moved."""
    work = side.work
    seen = watched(side.engine, lambda: work.run(side.engine), Batch, Preempted)
    batches, preempted = seen.of(Batch), seen.of(Preempted)
    necessary = sum(map(len, work.prompts)) + work.num_output_tokens - len(work.prompts)  # the last is never fed in
    return {
        "tokens_per_second": work.num_output_tokens / seconds,
        "seconds": seconds,
        "preemptions": side.preemptions[-1],
        "steps": side.steps,
        "mean_batch": statistics.mean(len(batch.rids) for batch in batches),
        "tokens_computed": sum(batch.total_tokens for batch in batches),
        "tokens_again": sum(batch.total_tokens for batch in batches) - necessary,
        "tokens_swapped": sum(event.num_tokens for event in preempted if event.mode == "swap"),
        "same_answers": sum(a == b for a, b in zip(side.tokens, roomy.tokens, strict=True)),
    }


# --- shared -----------------------------------------------------------------------------------------------------------


def parallel_sampling(model: TestedModel, *, prompt_len: int, num_tokens: int, rounds: int, seed: int) -> Row:
    """Four continuations of one prompt: as one request with n = 4, and as four requests."""
    engine = _paged(model, 16)
    prompt = Ragged.drawn(1, prompts=(prompt_len, prompt_len), outputs=(1, 1), seed=seed).prompts[0]

    def params(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=num_tokens, ignore_eos=True)

    answers: dict[str, list[tuple[int, ...]]] = {}

    def forked() -> float:
        begin = time.perf_counter()
        output = engine.generate(prompt, params(NUM_CONTINUATIONS, seed))
        answers["forked"] = [completion.token_ids for completion in output.outputs]
        return time.perf_counter() - begin

    def separate() -> float:
        begin = time.perf_counter()
        own = [params(1, seed + i) for i in range(NUM_CONTINUATIONS)]
        outputs = engine.generate_batch([prompt] * NUM_CONTINUATIONS, own, progress=False)
        answers["separate"] = [output.token_ids for output in outputs.values()]
        return time.perf_counter() - begin

    ways = {"separate": separate, "forked": forked}
    seconds = interleaved(ways, rounds=rounds)
    rows = {name: {"seconds": seconds[name]} | _sharing(engine, call) for name, call in ways.items()}
    return {
        "continuations": NUM_CONTINUATIONS,
        "prompt": prompt_len,
        "output": num_tokens,
        "ways": rows,
        "same_answers": sum(a == b for a, b in zip(answers["forked"], answers["separate"], strict=True)),
    }


def _sharing(engine: LLMEngine, call: Callable[[], object]) -> Row:
    """One more run, with a reader attached: tokens that were prefilled, blocks that were taken."""
    seen = watched(engine, call, Batch, BlocksUsed, BlockCopied)
    usage = seen.of(BlocksUsed)
    return {
        "prefill_tokens": sum(n for batch in seen.of(Batch) for n in batch.extend_lens if n > 1),
        "peak_blocks": max(u.num_used for u in usage),
        "peak_shared": max(u.num_shared for u in usage),
        "blocks_copied": len(seen.of(BlockCopied)),
        "per_step": [{"used": u.num_used, "shared": u.num_shared} for u in usage],
    }
