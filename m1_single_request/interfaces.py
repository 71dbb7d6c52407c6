"""What each role of the engine must offer, as Protocols: the seams at which parts are exchanged.

Constructor arguments are keyword-only and fixed here, so that a part written by a reader fits wherever the default one
does. `ROLES` maps the role's name to its Protocol; `check_parts` compares a table of parts against it.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Any, Protocol, Unpack

from torch import Tensor

from m1_single_request.config import ModelConfig
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import ConfigError, shown
from m1_single_request.input_processor import Message, Prompt, RequestOptions
from m1_single_request.model_loader import LoadedModel
from m1_single_request.model_runner import ModelInputs
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.request import BaseFinishReason, Request, Sequence
from m1_single_request.sampler import SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.sampling_step import SampledTokens
from m1_single_request.scheduler import SchedulerOutput
from m1_single_request.stop_checker import StopVerdict
from m1_single_request.tracer import Tracer


class ModelLoaderInterface(Protocol):
    """Brings a model into memory."""

    def __call__(self, config: ModelConfig) -> LoadedModel: ...


class InputProcessorInterface(Protocol):
    """Checks what a user hands in and builds requests."""

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        seed: int,
    ) -> None: ...
    def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int,
        arrival_time: float,
        **options: Unpack[RequestOptions],
    ) -> Request: ...
    def apply_chat_template(
        self, messages: SequenceOf[Message], options: Mapping[str, Any] | None = None
    ) -> list[int]: ...


class RequestInterface(Protocol):
    """The scheduled unit."""

    def __init__(
        self, request_id: str, prompt: str | None, sequence: Sequence, seed: int, arrival_time: float
    ) -> None: ...


class DetokenizerInterface(Protocol):
    """Grows the text of one sequence."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None: ...
    def push(self, token_id: int) -> None: ...
    @property
    def text(self) -> str: ...
    def tail(self) -> str: ...
    def mark(self) -> Any: ...
    def rewind(self, mark: Any) -> None: ...
    def token_text(self, token_id: int) -> str: ...


class StopCheckerInterface(Protocol):
    """Decides where an output ends."""

    def __init__(self, *, eos_token_ids: Iterable[int], max_model_len: int) -> None: ...
    def stop_ids(self, sequence: Sequence) -> frozenset[int]: ...
    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict: ...


class SchedulerInterface(Protocol):
    """Decides who runs."""

    requests: dict[str, Request]
    waiting: Collection[Request]
    running: list[Request]

    def __init__(self, *, stop_checker: StopCheckerInterface, tracer: Tracer) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def schedule(self) -> SchedulerOutput | None: ...
    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...
    def reset(self, reason: BaseFinishReason) -> None: ...
    def check_invariants(self) -> None: ...


class ModelRunnerInterface(Protocol):
    """Runs the model and holds the KV."""

    kv_bytes_per_token: int

    def __init__(self, *, loaded_model: LoadedModel, tracer: Tracer) -> None: ...
    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> ModelInputs: ...
    def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]: ...
    def free_request_cache(self, request_id: str) -> None: ...
    def clear_kv_caches(self) -> None: ...
    def num_kv_tokens(self) -> int: ...


class SamplerInterface(Protocol):
    """Chooses tokens."""

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput: ...


class OutputProcessorInterface(Protocol):
    """Makes what the caller sees."""

    def __init__(self, *, tracer: Tracer) -> None: ...
    def make_output(self, request: Request) -> RequestOutput: ...


class EngineCoreInterface(Protocol):
    """Runs steps."""

    input_processor: InputProcessorInterface

    def __init__(
        self,
        *,
        input_processor: Any,
        scheduler: Any,
        model_runner: Any,
        sampling_step: Any,
        output_processor: Any,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def abort_request(self, request_id: str) -> bool: ...
    def has_unfinished_requests(self) -> bool: ...
    def is_unfinished(self, request_id: str) -> bool: ...
    def run_step(self) -> dict[str, RequestOutput]: ...
    def changing(self) -> AbstractContextManager[None]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class WiringInterface(Protocol):
    """Assembles an engine core from a configuration and a table of parts."""

    def __call__(self, config: Any, parts: Mapping[str, Any], tracer: Tracer) -> EngineCoreInterface: ...


ROLES: dict[str, type] = {
    "wiring": WiringInterface,
    "model_loader": ModelLoaderInterface,
    "input_processor": InputProcessorInterface,
    "request": RequestInterface,
    "detokenizer": DetokenizerInterface,
    "stop_checker": StopCheckerInterface,
    "scheduler": SchedulerInterface,
    "model_runner": ModelRunnerInterface,
    "sampler": SamplerInterface,
    "output_processor": OutputProcessorInterface,
    "engine_core": EngineCoreInterface,
}


def check_parts(parts: Mapping[str, Any], roles: Mapping[str, type]) -> None:
    """Raise `ConfigError` for an unknown role, or a part that lacks a method or a constructor argument of its role."""
    for role, part in parts.items():
        if role not in roles:
            raise ConfigError(f"parts: there is no role {shown(role)}; the roles are {', '.join(roles)}")
        protocol = roles[role]
        name = getattr(part, "__name__", shown(part))
        if not callable(part):
            raise ConfigError(f"parts: {role!r} must be a class or a function, not {shown(part)}")
        if isinstance(part, type):
            lacking = [m for m in _methods(protocol) if not _has_method(part, m)]
            if lacking:
                raise ConfigError(f"parts: {role!r}: {name} has no {', '.join(f'{m}()' for m in lacking)}")
        refused, extra = _argument_differences(part, protocol)
        if refused:
            raise ConfigError(f"parts: {role!r}: {name} does not take the argument {', '.join(refused)}")
        if extra:
            raise ConfigError(f"parts: {role!r}: {name} needs the argument {', '.join(extra)}, which nobody gives it")


def _methods(protocol: type) -> list[str]:
    """Names of the methods that the role has, also from the Protocols it extends."""
    classes = [cls for cls in protocol.__mro__ if cls not in (object, Protocol)]
    found = {name: value for cls in classes for name, value in vars(cls).items() if inspect.isfunction(value)}
    return [name for name in found if name == "__call__" or not name.startswith("_")]


def _has_method(part: type, name: str) -> bool:
    """Whether instances of `part` have the method. A class itself is always callable, which says nothing."""
    return callable(next((vars(cls)[name] for cls in part.__mro__ if name in vars(cls)), None))


def _argument_differences(part: Any, protocol: type) -> tuple[list[str], list[str]]:
    """Constructor arguments that the role is built with and `part` refuses; and those that only `part` insists on."""
    if not isinstance(part, type):
        return [], []
    init = vars(protocol).get("__init__")
    given = [p for p in inspect.signature(init).parameters.values() if p.name != "self"] if init else []
    accepted = list(inspect.signature(part).parameters.values())
    names = {p.name for p in accepted}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    refused = [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name not in names and not takes_any]
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    insisted = [p.name for p in accepted if p.default is p.empty and p.kind not in optional]
    return refused, [name for name in insisted if name not in {p.name for p in given}]
