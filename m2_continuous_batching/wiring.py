"""m2's parts: m1's table with the roles that a batch changes, and the function that builds the engine core."""

from collections.abc import Mapping
from typing import Any

from m1_single_request.events import EngineStarted
from m1_single_request.tracer import Tracer
from m1_single_request.wiring import PARTS as M1_PARTS
from m2_continuous_batching.config import EngineConfig
from m2_continuous_batching.engine_core import EngineCore
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_processor import InputProcessor
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.worker import GPUWorker


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the model and build the engine core from the parts."""
    loaded = parts["model_loader"](config.model)
    tracer.emit(EngineStarted.of, loaded)
    limits = config.scheduler.resolved(loaded.max_model_len)
    stop_checker = parts["stop_checker"](eos_token_ids=loaded.eos_token_ids, max_model_len=loaded.max_model_len)
    kv_manager = parts["kv_manager"](max_num_seqs=limits.max_num_seqs, max_model_len=loaded.max_model_len)
    runner = parts["model_runner"](loaded_model=loaded, scheduler_config=limits, tracer=tracer)
    return parts["engine_core"](
        input_processor=parts["input_processor"](
            request_class=parts["request"],
            detokenizer_class=parts["detokenizer"],
            loaded_model=loaded,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            seed=config.model.seed,
        ),
        scheduler=parts["scheduler"](
            scheduler_config=limits, kv_manager=kv_manager, stop_checker=stop_checker, tracer=tracer
        ),
        executor=parts["executor"](worker=parts["worker"](model_runner=runner)),
        sampler=parts["sampler"](),
        stop_checker=stop_checker,
        output_processor=parts["output_processor"](),
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        parts=parts,
        tracer=tracer,
    )


PARTS: dict[str, Any] = M1_PARTS | {
    "wiring": build_engine_core,
    "input_processor": InputProcessor,
    "kv_manager": SlotManager,
    "scheduler": Scheduler,
    "model_runner": ModelRunner,
    "worker": GPUWorker,
    "executor": GPUExecutor,
    "engine_core": EngineCore,
}
