"""m1's parts: the class or function of each role, and the function that builds the engine core from them.

`PARTS` is the summary of a milestone: each later one is the previous table with the roles that it replaces.
`LLMEngine(parts={"scheduler": MyScheduler})` replaces one for a single engine.
"""

from collections.abc import Mapping
from typing import Any

from m1_single_request.config import EngineConfig
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.engine_core import EngineCore
from m1_single_request.events import EngineStarted
from m1_single_request.input_processor import InputProcessor
from m1_single_request.model_loader import load_model
from m1_single_request.model_runner import ModelRunner
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler
from m1_single_request.scheduler import Scheduler
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the model and build the engine core from the parts."""
    loaded = parts["model_loader"](config.model)
    tracer.emit(EngineStarted.of, loaded)
    stop_checker = parts["stop_checker"](eos_token_ids=loaded.eos_token_ids, max_model_len=loaded.max_model_len)
    return parts["engine_core"](
        input_processor=parts["input_processor"](
            request_class=parts["request"],
            detokenizer_class=parts["detokenizer"],
            loaded_model=loaded,
            seed=config.model.seed,
        ),
        scheduler=parts["scheduler"](stop_checker=stop_checker, tracer=tracer),
        model_runner=parts["model_runner"](loaded_model=loaded, tracer=tracer),
        sampler=parts["sampler"](),
        stop_checker=stop_checker,
        output_processor=parts["output_processor"](),
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        parts=parts,
        tracer=tracer,
    )


PARTS: dict[str, Any] = {
    "wiring": build_engine_core,
    "model_loader": load_model,
    "input_processor": InputProcessor,
    "request": Request,
    "detokenizer": IncrementalDetokenizer,
    "stop_checker": StopChecker,
    "scheduler": Scheduler,
    "model_runner": ModelRunner,
    "sampler": Sampler,
    "output_processor": OutputProcessor,
    "engine_core": EngineCore,
}
