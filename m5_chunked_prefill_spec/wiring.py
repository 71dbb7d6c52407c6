"""Parts of an m5 engine: m4's table with the roles that pieces and drafts change, and the functions that build them.

A draft model may be loaded beside the target. With `target_gap_ms` the costs of steps are measured before the scheduler
is built.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m3_paged_attention.device_limits import device_limits
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.kv_cache_config import check_memory_share
from m3_paged_attention.step_threads import StepThreads, step_threads
from m3_paged_attention.wiring import record_experts, trace_start
from m3_paged_attention.worker import GPUWorker
from m4_radix_cache.engine_core import EngineCore
from m4_radix_cache.schedule_batch import Pools
from m4_radix_cache.tiers import WatchedLoader, tiers_of
from m4_radix_cache.wiring import (
    PARTS as M4_PARTS,
    build_pools,
    build_scheduler as whole_prompts_scheduler,
    fit_to_memory,
    prefix_cache_class,
    reserve_kv_memory,
)
from m5_chunked_prefill_spec.batch_composer import DecodeFirst, PrefillFirst
from m5_chunked_prefill_spec.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.events import CostsMeasured
from m5_chunked_prefill_spec.input_processor import InputProcessor
from m5_chunked_prefill_spec.model_runner import ModelRunner
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.request import Req
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunner, limited, load_draft_model
from m5_chunked_prefill_spec.speculative.proposer import make_proposer
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from m5_chunked_prefill_spec.speculative.speculation import Speculation


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the models, size the KV memory, measure the costs of steps if needed, and connect the parts."""
    check_memory_share(config.cache, config.model.torch_device())
    prefix_cache_class(config.cache, parts)  # raises before the model is loaded
    load, kv_cache_dtype = WatchedLoader(parts["model_loader"], config.cache), config.cache.kv_cache_dtype
    loaded = load(config.model, kv_cache_dtype=kv_cache_dtype)
    drafting = load_draft_model(
        load, config.model, kv_cache_dtype, config.speculative, loaded, default_models=(DEFAULT_MODEL,)
    )
    loaded = limited(loaded, drafting)
    threads = step_threads(tracer, loaded, drafting)
    loaded, (limits, executor, rows, worker), budget = fit_to_memory(
        loaded, lambda loaded: build_executor(config, parts, loaded, drafting, tracer, threads), config
    )
    trace_start(loaded, config.model, limits, tracer)
    kv_cache_config = reserve_kv_memory(executor, config, budget, loaded, tracer)
    costs = cost_table(limits, worker, tracer)
    record_experts(config.trace, loaded, worker, tracer)
    models = [each for each in (drafting, loaded) if each is not None]
    tiers = tiers_of(config, load, models, worker.model_runner, parts)
    pools = build_pools(kv_cache_config.num_blocks, rows, config, tiers, parts, tracer)
    num_tokens = pools.token_to_kv_pool_allocator.size
    return parts["engine_core"](
        input_processor=build_input_processor(config, limits, parts, loaded, num_tokens),
        scheduler=build_scheduler(config, limits, parts, pools, loaded, costs, tracer),
        executor=executor,
        output_processor=parts["output_processor"](),
        kv_bytes_per_token=kv_cache_config.spec.bytes_per_token,
        parts=parts,
        tracer=tracer,
    )


class Runner(NamedTuple):
    """The executor with its worker, their limits, and the rows of slots that they read."""

    limits: SchedulerConfig
    executor: GPUExecutor
    rows: ReqToTokenPool
    worker: GPUWorker


def build_executor(
    config: EngineConfig,
    parts: Mapping[str, Any],
    loaded: Any,
    drafting: Any,
    tracer: Tracer,
    threads: StepThreads | None,
    **more: Any,
) -> Runner:
    """Build the executor for requests of at most `loaded.max_model_len` tokens. `more`: further keywords of the
    `model_runner`."""
    models = [each.model for each in (loaded, drafting) if each is not None]
    bytes_per_token = sum(model.kv_cache_spec(1).block_bytes for model in models)
    device = config.speculative.limits(device_limits(loaded, bytes_per_token=bytes_per_token))
    limits = config.scheduler.resolved(loaded.max_model_len, device)
    assert limits.max_num_seqs is not None
    rows = parts["req_to_token_pool"](size=limits.max_num_seqs, max_context_len=loaded.max_model_len)
    runner = parts["model_runner"](
        loaded_model=loaded,
        scheduler_config=limits,
        req_to_token_pool=rows,
        rejection_sampler=parts["rejection_sampler"](
            sampler=parts["sampler"](), token_text=parts["detokenizer"](loaded.tokenizer).token_text, tracer=tracer
        ),
        draft_runner=drafting and parts["draft_runner"](loaded_model=drafting, req_to_token_pool=rows),
        num_draft_tokens=config.speculative.num_draft_tokens,
        **more,
    )
    worker = parts["worker"](model_runner=runner, step_threads=threads)
    return Runner(limits, parts["executor"](worker=worker), rows, worker)


def build_input_processor(
    config: EngineConfig,
    limits: SchedulerConfig,
    parts: Mapping[str, Any],
    loaded: Any,
    max_total_tokens: int,
    **more: Any,
) -> Any:
    """Build the input processor for a KV memory of `max_total_tokens`. `more`: further keywords of it."""
    return parts["input_processor"](
        request_class=parts["request"],
        detokenizer_class=parts["detokenizer"],
        loaded_model=loaded,
        max_num_batched_tokens=None if limits.enable_chunked_prefill else limits.max_num_batched_tokens,
        max_total_tokens=max_total_tokens,
        seed=config.model.seed,
        **more,
    )


def build_scheduler(
    config: EngineConfig,
    limits: SchedulerConfig,
    parts: Mapping[str, Any],
    pools: Pools,
    loaded: Any,
    costs: CostTable | None,
    tracer: Tracer,
) -> Any:
    """Build the scheduler and the parts that it calls. Raises `ConfigError` as `build_speculation` does."""
    return whole_prompts_scheduler(
        config,
        limits,
        parts,
        pools,
        loaded,
        tracer,
        composer=parts["composer"](limits, costs),
        speculation=build_speculation(config.speculative, parts, loaded),
        chunk_alignment=chunk_alignment(limits, config.cache.page_size),
    )


def build_speculation(config: SpeculativeConfig, parts: Mapping[str, Any], loaded: Any) -> Any:
    """Build the proposer and the speculation. Raises `ConfigError` for a proposer that is never called."""
    proposer = parts["proposer"](config)
    if proposer is not None and config.method is None:
        raise ConfigError(
            "the part 'proposer' has no effect with SpeculativeConfig(method=None): use method='ngram' for tokens that "
            "are known on the host"
        )
    return parts["speculation"](
        proposer=proposer,
        config=config,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
    )


def make_composer(config: SchedulerConfig, costs: CostTable | None) -> DecodeFirst | PrefillFirst:
    """Return the composer for the schedule of the configuration."""
    if config.schedule == "prefill_first":
        return PrefillFirst()
    return DecodeFirst(target_gap_ms=config.target_gap_ms, cost_table=costs)


# --8<-- [start:parts]
PARTS: dict[str, Any] = M4_PARTS | {
    "wiring": build_engine_core,
    "request": Req,
    "input_processor": InputProcessor,
    "req_to_token_pool": ReqToTokenPool,
    "schedule_policy": SchedulePolicy,
    "prefill_adder": PrefillAdder,
    "composer": make_composer,
    "proposer": make_proposer,
    "speculation": Speculation,
    "draft_runner": DraftRunner,
    "rejection_sampler": RejectionSampler,
    "scheduler": Scheduler,
    "model_runner": ModelRunner,
}
# --8<-- [end:parts]


def cost_table(limits: SchedulerConfig, worker: GPUWorker, tracer: Tracer) -> CostTable | None:
    """Return the cost table for `target_gap_ms`, given or measured now on the device of `worker`, and emit it; None
    without a target."""
    if limits.target_gap_ms is None:
        return None
    assert limits.max_num_batched_tokens is not None
    with worker.on_device:
        table = limits.cost_table or worker.model_runner.measure_costs(limits.max_num_batched_tokens)
    tracer.emit(CostsMeasured.of, table, given=limits.cost_table is not None)
    return table


def chunk_alignment(config: SchedulerConfig, page_size: int) -> int:
    """Return the number of tokens at whose multiples a prompt may be cut: 1 with decodes first, else `page_size`.

    Raises `ConfigError` if a step has no room for a page.
    """
    if config.schedule == "decode_first":
        return 1
    assert config.max_num_batched_tokens is not None
    room = min(config.max_num_batched_tokens, config.chunked_prefill_size or config.max_num_batched_tokens)
    if config.enable_chunked_prefill and room < page_size:
        name = "max_num_batched_tokens" if room == config.max_num_batched_tokens else "chunked_prefill_size"
        raise ConfigError(
            f"{name}={room} is less than a page of page_size={page_size} tokens, and schedule='prefill_first' cuts "
            f"prompts at pages only"
        )
    return page_size
