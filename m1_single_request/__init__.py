"""Milestone 1: one request at a time, complete and traced.

The loop of every LLM engine, at its smallest: schedule, prepare inputs, execute, sample, update, make outputs, release.
One request runs at a time on transformers' own model; the others wait in order. All of the public face is here already,
and later milestones keep it: this same line imports the engine of any of them.

    from m1_single_request import LLMEngine, SamplingParams

Read `llm_engine.py`, then `engine_core.py`, `scheduler.py`, `model_runner.py`, `sampler.py`; `wiring.py` is the table
of contents.
"""

from m1_single_request.config import DEFAULT_MODEL, EngineConfig, ModelConfig, TraceConfig
from m1_single_request.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineUsageError,
    ForwardError,
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    ModelLoadError,
    PartError,
    PromptTooLongError,
)
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
from m1_single_request.request_stream import RequestStream
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ChromeTraceReader, ConsoleReader, JsonlReader
from m1_single_request.tracer import Tracer, TraceReader, TraceRecord
from m1_single_request.wiring import PARTS, build_engine_core

__all__ = [
    "DEFAULT_MODEL",
    "PARTS",
    "ChromeTraceReader",
    "CompletionOutput",
    "ConfigError",
    "ConsoleReader",
    "DuplicateRequestError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "EngineUsageError",
    "ForwardError",
    "InvalidParamsError",
    "InvalidPromptError",
    "InvalidRequestError",
    "JsonlReader",
    "LLMEngine",
    "Logprob",
    "ModelConfig",
    "ModelLoadError",
    "PartError",
    "PromptTooLongError",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TraceConfig",
    "TraceReader",
    "TraceRecord",
    "Tracer",
    "build_engine_core",
]
