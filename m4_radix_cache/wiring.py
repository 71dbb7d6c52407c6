"""m4's table of parts: m3's table with the roles that the prefix cache changes, and the construction of the parts.

Pools and cache are built before the scheduler, and the rows of slots before the runner, which reads them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import LoadedModel
from m1_single_request.tracer import Tracer
from m3_paged_attention.device_limits import device_limits
from m3_paged_attention.events import EagerSteps
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.kv_cache_config import Budget, check_memory_share, size_kv_cache
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.model_len import fit_model_len
from m3_paged_attention.step_threads import step_threads
from m3_paged_attention.wiring import PARTS as M3_PARTS, record_experts, trace_start
from m3_paged_attention.worker import GPUWorker
from m4_radix_cache.config import CacheConfig, EngineConfig, SchedulerConfig
from m4_radix_cache.engine_core import EngineCore
from m4_radix_cache.input_processor import InputProcessor
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_runner import ModelRunner
from m4_radix_cache.prefill_adder import PrefillAdder
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools
from m4_radix_cache.schedule_policy import SchedulePolicy
from m4_radix_cache.scheduler import Scheduler
from m4_radix_cache.tiers import WatchedLoader, tiers_of


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the model, size the KV memory, and build the engine core from its parts."""
    check_memory_share(config.cache, config.model.torch_device())
    prefix_cache_class(config.cache, parts)  # raises before the model is loaded
    load = WatchedLoader(parts["model_loader"], config.cache)
    loaded = load(config.model, kv_cache_dtype=config.cache.kv_cache_dtype)
    loaded, (limits, executor, rows, worker), budget = fit_to_memory(
        loaded, lambda loaded: build_executor(config, parts, loaded, tracer), config
    )
    trace_start(loaded, config.model, limits, tracer)
    kv_cache_config = reserve_kv_memory(executor, config, budget, loaded, tracer)
    record_experts(config.trace, loaded, worker, tracer)
    tiers = tiers_of(config, load, [loaded], worker.model_runner, parts)
    pools = build_pools(kv_cache_config.num_blocks, rows, config, tiers, parts, tracer)
    return parts["engine_core"](
        input_processor=parts["input_processor"](
            request_class=parts["request"],
            detokenizer_class=parts["detokenizer"],
            loaded_model=loaded,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_total_tokens=pools.token_to_kv_pool_allocator.size,
            seed=config.model.seed,
        ),
        scheduler=build_scheduler(config, limits, parts, pools, loaded, tracer),
        executor=executor,
        output_processor=parts["output_processor"](),
        kv_bytes_per_token=kv_cache_config.spec.bytes_per_token,
        parts=parts,
        tracer=tracer,
    )


# --8<-- [start:parts]
PARTS: dict[str, Any] = {role: part for role, part in M3_PARTS.items() if role != "kv_manager"} | {
    "wiring": build_engine_core,
    "input_processor": InputProcessor,
    "request": Req,
    "req_to_token_pool": ReqToTokenPool,
    "token_to_kv_pool_allocator": TokenToKVPoolAllocator,
    "prefix_cache": RadixCache,
    "tiered_cache": HiRadixCache,
    "host_kv_pool": HostKVPool,
    "disk_cache": DiskRadixCache,
    "schedule_policy": SchedulePolicy,
    "prefill_adder": PrefillAdder,
    "scheduler": Scheduler,
    "model_runner": ModelRunner,
    "engine_core": EngineCore,
}
# --8<-- [end:parts]


def prefix_cache_class(config: CacheConfig, parts: Mapping[str, Any]) -> Any:
    """Return the cache class that the configuration names. Raises `ConfigError` if the parts name another one."""
    own = parts["prefix_cache"]
    if config.host_memory_bytes:
        if own is not RadixCache:
            raise ConfigError(
                "host_memory_bytes has no effect on a prefix_cache of your own: use the part tiered_cache"
            )
        return parts["disk_cache" if config.disk_path else "tiered_cache"]
    if config.prefix_cache == "radix":
        return own
    if own is not RadixCache:
        raise ConfigError(f"the parts name a prefix cache, and prefix_cache={config.prefix_cache!r} another one")
    return BlockHashCache if config.prefix_cache == "hash" else ChunkCache


class Runner(NamedTuple):
    """Executor for requests up to some length, with its worker, their limits, and the rows of slots that they read."""

    limits: SchedulerConfig
    executor: GPUExecutor
    rows: ReqToTokenPool
    worker: GPUWorker


def build_executor(config: EngineConfig, parts: Mapping[str, Any], loaded: LoadedModel, tracer: Tracer) -> Runner:
    """Build the executor for requests of at most `loaded.max_model_len` tokens."""
    device = device_limits(loaded, bytes_per_token=loaded.model.kv_cache_spec(1).block_bytes)
    limits = config.scheduler.resolved(loaded.max_model_len, device)
    assert limits.max_num_seqs is not None
    rows = parts["req_to_token_pool"](size=limits.max_num_seqs, max_context_len=loaded.max_model_len)
    runner = parts["model_runner"](
        loaded_model=loaded,
        scheduler_config=limits,
        req_to_token_pool=rows,
        sampler=parts["sampler"](),
        token_text=parts["detokenizer"](loaded.tokenizer).token_text,
        tracer=tracer,
    )
    worker = parts["worker"](model_runner=runner, step_threads=step_threads(tracer, loaded))
    return Runner(limits, parts["executor"](worker=worker), rows, worker)


def build_scheduler(
    config: Any, limits: Any, parts: Mapping[str, Any], pools: Pools, loaded: Any, tracer: Tracer, **more: Any
) -> Any:
    """Build the scheduler and the parts that it calls. `more`: further keywords of it."""
    return parts["scheduler"](
        scheduler_config=limits,
        pools=pools,
        policy=parts["schedule_policy"](
            limits.schedule_policy, tree_cache=pools.tree_cache, seed=config.model.seed, tracer=tracer
        ),
        prefill_adder=parts["prefill_adder"],
        preemption=parts["preemption"](),
        stop_checker=parts["stop_checker"](eos_token_ids=loaded.eos_token_ids, max_model_len=loaded.max_model_len),
        vocab_size=loaded.vocab_size,
        device=config.model.torch_device(),
        tracer=tracer,
        **more,
    )


def fit_to_memory(
    loaded: Any, make: Callable[[Any], Any], config: EngineConfig, **more: Any
) -> tuple[Any, Any, Budget]:
    """Call m3's `fit_model_len` with m4's page size and the name of its size setting. `more`: further keywords."""
    return fit_model_len(
        loaded,
        make,
        named=config.model.max_model_len,
        cache_config=config.cache,
        block_size=config.cache.page_size,
        device=config.model.torch_device(),
        size_setting="max_total_tokens",
        **more,
    )


def reserve_kv_memory(
    executor: GPUExecutor, config: EngineConfig, budget: Budget, loaded: LoadedModel, tracer: Tracer
) -> KVCacheConfig:
    """Compute the number of pages, and reserve them in the runner. The cache uses all of them, so none is too many."""
    kv_cache_config = size_kv_cache(
        executor.kv_cache_spec(config.cache.page_size),
        budget=budget,
        device=config.model.torch_device(),
        max_model_len=loaded.max_model_len,
        max_num_seqs=None,
        swap_space_bytes=0,
        size_setting=("max_total_tokens", config.cache.page_size),
        tracer=tracer,
    )
    executor.initialize_kv_cache(kv_cache_config)
    tracer.emit(EagerSteps.of, loaded.model)
    return kv_cache_config


def build_pools(
    num_pages: int,
    rows: ReqToTokenPool,
    config: EngineConfig,
    tiers: Mapping[str, Any],
    parts: Mapping[str, Any],
    tracer: Tracer,
) -> Pools:
    """Build the pools: `rows`, slots in `num_pages` pages, and the cache that shares them, with its `tiers`."""
    cache, make_slots = config.cache, parts["token_to_kv_pool_allocator"]
    slots = make_slots(size=num_pages * cache.page_size, page_size=cache.page_size, checked=cache.debug)
    tree_cache = prefix_cache_class(cache, parts)(
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=slots,
        eviction_policy=cache.eviction_policy,
        tracer=tracer,
        **tiers,
    )
    return Pools(rows, slots, tree_cache, debug=cache.debug)
