"""The part of the public face that is the same in all milestones: parameters, outputs, errors, trace.

Each milestone's `__init__.py` imports it as a whole and adds its own names.
"""

from m1_single_request.config import TraceConfig
from m1_single_request.errors import *
from m1_single_request.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from m1_single_request.request_stream import RequestStream
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_file import read_trace
from m1_single_request.trace_readers import ChromeTraceReader, ConsoleReader, JsonlReader
from m1_single_request.tracer import Tracer, TraceReader, TraceRecord

__all__ = [
    "ChromeTraceReader", "CompletionOutput", "ConfigError", "ConsoleReader", "DuplicateRequestError",
    "EngineClosedError", "EngineDeadError", "EngineError", "EngineUsageError", "ForwardError", "InvalidParamsError",
    "InvalidPromptError", "InvalidRequestError", "JsonlReader", "Logprob", "ModelLoadError", "PartError",
    "PromptTooLongError", "RequestMetrics", "RequestOutput", "RequestStream", "SamplingParams", "TraceConfig",
    "TraceReader", "TraceRecord", "Tracer", "read_trace",
]  # fmt: skip
