"""m3's parts: m2's table with the roles that blocks change, and the function that builds the engine core.

The order of sizing: load the model, run the profiling step if one is needed, fit the longest request, compute the
number of blocks, then build the parts that depend on these.
"""

from collections.abc import Mapping
from typing import Any

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import LoadedModel
from m1_single_request.tracer import Tracer
from m2_continuous_batching.wiring import PARTS as M2_PARTS
from m3_paged_attention.attention.registry import obstacle_to_best
from m3_paged_attention.config import BatchLimits, EngineConfig, ModelConfig, TraceConfig
from m3_paged_attention.device_limits import device_limits, device_memory
from m3_paged_attention.engine_core import EngineCore
from m3_paged_attention.events import BackendChosen, EagerSteps, EngineStarted, StepLimits
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.expert_events import ExpertsLoaded
from m3_paged_attention.expert_recorder import ExpertRecorder
from m3_paged_attention.input_processor import InputProcessor
from m3_paged_attention.kv_cache_config import check_cache_config, size_kv_cache
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.model_len import Runner, fit_model_len
from m3_paged_attention.model_loader import load_model
from m3_paged_attention.model_runner import ModelRunner
from m3_paged_attention.output_processor import OutputProcessor
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.step_threads import step_threads
from m3_paged_attention.worker import GPUWorker


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the model, size the KV memory, and build the engine core from the parts."""
    mode, device = config.scheduler.preemption_mode, config.model.torch_device()
    # on a CPU the blocks for swapping are in the same memory, and as many
    has_copy = device.type == "cpu" and mode == "swap" and config.cache.swap_space_bytes is None
    check_cache_config(config.cache, preemption_mode=mode, device=device)
    loaded = parts["model_loader"](config.model, kv_cache_dtype=config.cache.kv_cache_dtype)
    loaded, (limits, executor), budget = fit_model_len(
        loaded,
        lambda loaded: build_executor(config, parts, loaded, tracer),
        named=config.model.max_model_len,
        cache_config=config.cache,
        block_size=config.cache.block_size,
        device=device,
        size_setting="num_blocks",
        num_shares=2 if has_copy else 1,
    )
    trace_start(loaded, config.model, limits, tracer)
    kv_cache_config: KVCacheConfig = size_kv_cache(
        executor.kv_cache_spec(config.cache.block_size),
        budget=budget,
        device=device,
        max_model_len=loaded.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        swap_space_bytes=config.cache.swap_space_bytes if mode == "swap" else 0,
        size_setting=("num_blocks", 1),
        tracer=tracer,
    )
    executor.initialize_kv_cache(kv_cache_config)
    tracer.emit(EagerSteps.of, loaded.model)
    record_experts(config.trace, loaded, executor.worker, tracer)
    return parts["engine_core"](
        input_processor=parts["input_processor"](
            request_class=parts["request"],
            detokenizer_class=parts["detokenizer"],
            loaded_model=loaded,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_blocks=kv_cache_config.num_blocks,
            block_size=kv_cache_config.spec.block_size,
            seed=config.model.seed,
        ),
        scheduler=parts["scheduler"](
            scheduler_config=limits,
            kv_manager=parts["kv_manager"](kv_cache_config=kv_cache_config, tracer=tracer),
            preemption=parts["preemption"](),
            stop_checker=parts["stop_checker"](eos_token_ids=loaded.eos_token_ids, max_model_len=loaded.max_model_len),
            tracer=tracer,
        ),
        executor=executor,
        output_processor=parts["output_processor"](),
        kv_bytes_per_token=kv_cache_config.spec.bytes_per_token,
        parts=parts,
        tracer=tracer,
    )


PARTS: dict[str, Any] = M2_PARTS | {
    "wiring": build_engine_core,
    "model_loader": load_model,
    "input_processor": InputProcessor,
    "request": Request,
    "kv_manager": KVCacheManager,
    "preemption": FewestOutputsFirst,
    "scheduler": Scheduler,
    "model_runner": ModelRunner,
    "worker": GPUWorker,
    "executor": GPUExecutor,
    "output_processor": OutputProcessor,
    "engine_core": EngineCore,
}


def build_executor(config: EngineConfig, parts: Mapping[str, Any], loaded: LoadedModel, tracer: Tracer) -> Runner:
    """Build the parts that run requests of at most `loaded.max_model_len` tokens."""
    device = device_limits(loaded, bytes_per_token=loaded.model.kv_cache_spec(1).block_bytes)
    limits = config.scheduler.resolved(loaded.max_model_len, device)
    runner = parts["model_runner"](
        loaded_model=loaded,
        scheduler_config=limits,
        sampler=parts["sampler"](),
        token_text=parts["detokenizer"](loaded.tokenizer).token_text,
        tracer=tracer,
    )
    worker = parts["worker"](model_runner=runner, step_threads=step_threads(tracer, loaded))
    return Runner(limits, parts["executor"](worker=worker))


def trace_start(loaded: LoadedModel, config: ModelConfig, limits: BatchLimits, tracer: Tracer) -> None:
    """Emit the events that describe the model, its kernels and, on CUDA, the limits of a step."""
    tracer.emit(EngineStarted.of, loaded, config.quantization)
    tracer.emit(ExpertsLoaded.of, loaded)
    asked, backend = config.attention_backend, loaded.model.backend.name
    obstacle = obstacle_to_best(config.torch_device()) if asked == "auto" else None
    tracer.emit(BackendChosen, asked=asked, backend=backend, obstacle=obstacle)
    tracer.emit(StepLimits.of, limits, device_memory(loaded.device))


def record_experts(trace: Any, loaded: LoadedModel, worker: Any, tracer: Tracer) -> None:
    """Let the worker record the choices of the routers, if the configuration asks for it.

    Raises `ConfigError` for a model without experts, and for a worker of the user's own.
    """
    if not wants_experts(trace):
        return
    if loaded.model.config.experts is None:
        raise ConfigError(f"TraceConfig(experts=True) records the use of experts, and {loaded.name} has none")
    if type(worker).execute_model is not GPUWorker.execute_model:
        raise ConfigError("TraceConfig(experts=True) has no effect on a worker of your own")
    worker.recorder = ExpertRecorder(loaded.model, tracer)


def wants_experts(trace: Any) -> bool:
    """Return whether a `TraceConfig` of this milestone, or one of m1, asks for the use of experts."""
    return isinstance(trace, TraceConfig) and trace.experts
