"""m3: memory that is reserved and not used, memory that requests share, and a memory that is too small.

Everything that is counted here (blocks, tokens, preemptions) is the same on every machine.
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.engines import MAX_MODEL_LEN, Engines
from benchmarks.lesson import SEED, Row
from benchmarks.serving import Side, answer, num_same
from benchmarks.timing import interleaved, seconds_of
from benchmarks.traces import watched
from benchmarks.workloads import Workload, drawn
from m2_continuous_batching.events import Batch, KVUsage as DenseUsage
from m3_paged_attention import SamplingParams
from m3_paged_attention.kv_events import BlockCopied, BlocksUsed
from m3_paged_attention.scheduler_events import Preempted

BLOCK_SIZES = (1, 4, 16, 64, 128)
NUM_CONTINUATIONS = 4
POOL_SHARE = 3  # the small pool holds so many times less than the batch takes at most
Steps = list[dict[str, int]]


def fragmentation(engines: Engines, work: Workload, *, max_num_seqs: int) -> Row:
    """Count KV tokens reserved and held in each step: m2's slots and m3's blocks, over the same requests.

    m2 counts while a step runs and m3 after it, so a request that ends in a step is in one count only. The shortest
    slots that would do are as long as the longest request, which is not known in advance.
    """
    longest = max(len(request.prompt) + request.max_tokens for request in work.requests)
    rows: dict[str, Row] = {}
    for name, slot_len in {"shortest slots": longest, "slots": MAX_MODEL_LEN}.items():
        steps = _dense_steps(engines, work, max_num_seqs, slot_len)
        rows[name] = {"layout": f"m2, slots of {slot_len:,}"} | _waste(steps)
        if name == "slots":
            rows[name]["per_step"] = steps
    for block_size in BLOCK_SIZES:
        engine = paged(engines, max_num_seqs, block_size)
        steps = _paged_steps(engine, lambda engine=engine: answer(engine, work))
        rows[f"blocks of {block_size}"] = {"layout": f"m3, blocks of {block_size}"} | _waste(steps)
        if block_size == 16:
            rows["blocks of 16"]["per_step"] = steps
    return work.describe() | {"max_num_seqs": max_num_seqs, "layouts": rows}


def paged(engines: Engines, max_num_seqs: int, block_size: int = 16) -> Any:
    """Return an m3 engine with room for all."""
    cache = {"block_size": block_size, "kv_cache_memory_bytes": 2**30}
    return engines("m3", scheduler={"max_num_seqs": max_num_seqs}, cache=cache)


def _paged_steps(engine: Any, call: Callable[[], object]) -> Steps:
    (usage,) = watched(engine, call, BlocksUsed)
    return [{"reserved": u.num_used * u.block_size, "held": u.tokens_held, "shared": u.num_shared} for u in usage]


def _dense_steps(engines: Engines, work: Workload, max_num_seqs: int, slot_len: int) -> Steps:
    """Return the steps of m2, where all slots are reserved from the first step to the last."""
    engine = engines("m2", model={"max_model_len": slot_len}, scheduler={"max_num_seqs": max_num_seqs})
    (usage,) = watched(engine, lambda: answer(engine, work), DenseUsage)
    per_token = engine.engine_core.executor.worker.model_runner.kv_bytes_per_token
    return [{"reserved": u.kv_bytes_reserved // per_token, "held": u.kv_bytes_used // per_token} for u in usage]


def _waste(steps: Steps) -> Row:
    """Return the unused share over all steps, and in the step that held most."""
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


def preemption(engines: Engines, work: Workload, *, max_num_seqs: int, rounds: int) -> Row:
    """Measure the same requests with room for all, and in a pool a third as large, by recompute and by swap.

    Short prompts and long answers: many requests are admitted, grow, and run out of blocks under way. With long
    prompts, admission keeps them apart and few are preempted.
    """
    roomy = paged(engines, max_num_seqs)
    peak = max(step["reserved"] for step in _paged_steps(roomy, lambda: answer(roomy, work))) // 16
    pool = {"num_blocks": peak // POOL_SHARE}

    def small(mode: str) -> Side:
        limits = {"max_num_seqs": max_num_seqs, "preemption_mode": mode}
        return Side(engines("m3", scheduler=limits, cache=pool), work)

    sides = {"room for all": Side(roomy, work), "recompute": small("recompute"), "swap": small("swap")}
    seconds = interleaved(sides, rounds=rounds)
    rows = {name: _preempted(side, seconds[name], sides["room for all"]) for name, side in sides.items()}
    return work.describe() | {"peak_blocks": peak, "pool_blocks": pool["num_blocks"], "sides": rows}


def _preempted(side: Side, seconds: float, roomy: Side) -> Row:
    """Count, in one more run, the tokens that went through the model and those that were moved."""
    work = side.work
    batches, preempted = watched(side.engine, lambda: answer(side.engine, work), Batch, Preempted)
    necessary = work.num_prompt_tokens + work.num_output_tokens - len(work.requests)  # the last is never fed in
    computed = sum(batch.total_tokens for batch in batches)
    return {
        "tokens_per_second": work.num_output_tokens / seconds,
        "seconds": seconds,
        "preemptions": side.last.counts["num_preemptions"],
        "steps": side.last.counts["num_steps"],
        "mean_batch": statistics.mean(len(batch.rids) for batch in batches),
        "tokens_computed": computed,
        "tokens_again": computed - necessary,
        "tokens_swapped": sum(event.num_tokens for event in preempted if event.mode == "swap"),
        "same_answers": num_same(side.last.answers, roomy.last.answers),
    }


# --- shared -----------------------------------------------------------------------------------------------------------


def parallel_sampling(engines: Engines, *, prompt_len: int, num_tokens: int, rounds: int) -> Row:
    """Measure four continuations of one prompt: as one request with n = 4, and as four requests."""
    engine = paged(engines, 16)
    prompt = drawn(1, prompts=(prompt_len, prompt_len), outputs=(1, 1), seed=SEED).requests[0].prompt
    answers: dict[str, list[tuple[int, ...]]] = {}

    def params(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=num_tokens, ignore_eos=True)

    def forked() -> None:
        output = engine.generate(prompt, params(NUM_CONTINUATIONS, SEED))
        answers["forked"] = [completion.token_ids for completion in output.outputs]

    def separate() -> None:
        own = [params(1, SEED + i) for i in range(NUM_CONTINUATIONS)]
        outputs = engine.generate_batch([prompt] * NUM_CONTINUATIONS, own, progress=False)
        answers["separate"] = [output.token_ids for output in outputs.values()]

    ways = {"separate": separate, "forked": forked}
    seconds = interleaved({name: lambda way=way: seconds_of(way) for name, way in ways.items()}, rounds=rounds)
    return {
        "continuations": NUM_CONTINUATIONS,
        "prompt": prompt_len,
        "output": num_tokens,
        "ways": {name: {"seconds": seconds[name]} | _sharing(engine, way) for name, way in ways.items()},
        "same_answers": num_same(answers["forked"], answers["separate"]),
    }


def _sharing(engine: Any, call: Callable[[], object]) -> Row:
    """Count, in one more run, the tokens that were prefilled and the blocks that were taken."""
    batches, usage, copies = watched(engine, call, Batch, BlocksUsed, BlockCopied)
    return {
        "prefill_tokens": sum(n for batch in batches for n in batch.extend_lens if n > 1),
        "peak_blocks": max(u.num_used for u in usage),
        "peak_shared": max(u.num_shared for u in usage),
        "blocks_copied": len(copies),
        "per_step": [{"used": u.num_used, "shared": u.num_shared} for u in usage],
    }
