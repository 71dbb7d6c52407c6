"""The part of the public face that is the same in all milestones: parameters, outputs, errors, trace.

Each milestone's `__init__.py` imports it as a whole and adds its own names. `import X as X` exports a name.
"""

from m1_single_request.config import TraceConfig as TraceConfig
from m1_single_request.errors import (
    ConfigError as ConfigError,
    DuplicateRequestError as DuplicateRequestError,
    EngineClosedError as EngineClosedError,
    EngineDeadError as EngineDeadError,
    EngineError as EngineError,
    EngineUsageError as EngineUsageError,
    ForwardError as ForwardError,
    InvalidParamsError as InvalidParamsError,
    InvalidPromptError as InvalidPromptError,
    InvalidRequestError as InvalidRequestError,
    ModelLoadError as ModelLoadError,
    PartError as PartError,
    PromptTooLongError as PromptTooLongError,
)
from m1_single_request.outputs import (
    CompletionOutput as CompletionOutput,
    Logprob as Logprob,
    RequestMetrics as RequestMetrics,
    RequestOutput as RequestOutput,
)
from m1_single_request.request_stream import RequestStream as RequestStream
from m1_single_request.sampling_params import SamplingParams as SamplingParams
from m1_single_request.trace_readers import (
    ChromeTraceReader as ChromeTraceReader,
    ConsoleReader as ConsoleReader,
    JsonlReader as JsonlReader,
)
from m1_single_request.tracer import Tracer as Tracer, TraceReader as TraceReader, TraceRecord as TraceRecord

NAMES = [name for name in globals() if name[0].isupper()]
