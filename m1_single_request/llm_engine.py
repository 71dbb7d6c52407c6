"""The public face of the engine: prompts in, outputs out.

Written once for all milestones. A milestone's own `LLMEngine` names its table of parts, its configuration type and its
default model, and inherits everything else. The face is vLLM's `LLM` and `LLMEngine` in one; SGLang calls it `Engine`.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

from tqdm import tqdm

from m1_single_request.config import DEFAULT_MODEL, EngineConfig, assemble_config
from m1_single_request.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineError,
    EngineUsageError,
    InvalidRequestError,
    shown,
)
from m1_single_request.field_rules import valid
from m1_single_request.input_processor import Message, Prompt, RequestOptions, check_name
from m1_single_request.output_processor import rejected_output
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.parts import check_built, check_parts
from m1_single_request.request import Request
from m1_single_request.request_stream import Mailbox, RequestStream
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import Tracer
from m1_single_request.wiring import PARTS

Params = SamplingParams | None
MAX_PROMPTS = 2**20  # of a batch
PATIENCE = 1.0  # seconds; a shorter batch shows no progress bar
ABANDONED: Mailbox = deque(maxlen=0)  # of streams that were closed before the end of their request


class LLMEngine:
    """An engine with one model. It belongs to the thread and the process that built it: calls from others are errors.

    `LLMEngine()` runs the checkpoint that ships with the course, `LLMEngine("path or hub id")` any supported model,
    `LLMEngine(model_config=ModelConfig(...), trace_config=TraceConfig(...))` one that is configured. `parts` replaces
    classes by role, for this engine alone. Also a context manager: leaving it closes the engine.
    """

    parts: ClassVar[Mapping[str, Any]] = PARTS
    config_type: ClassVar[type] = EngineConfig
    default_model: ClassVar[str | Path] = DEFAULT_MODEL
    request_options: ClassVar[Sequence[str]] = ()
    """Keywords of a request besides its parameters: none here, `priority` for example in later milestones. Every call
    with a prompt accepts them."""

    def __init__(
        self, model: str | Path | None = None, *, parts: Mapping[str, Any] | None = None, **configs: Any
    ) -> None:
        self.config = assemble_config(self.config_type, self.default_model, model, configs)
        if parts is not None and not isinstance(parts, Mapping):
            raise ConfigError(f"parts must map roles to classes, not {shown(parts)}")
        table = {**self.parts, **(parts or {})}
        check_parts(table, self.parts)
        self.tracer = Tracer()
        for reader in readers_of(self.config.trace):
            self.tracer.attach(reader)
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._closed = False
        self._number = 0
        self._outputs: dict[str, RequestOutput] = {}  # for the next `step()`
        self._mailboxes: dict[str, Mailbox] = {}  # of streams whose last output was not taken; `ABANDONED`: not read
        self._dropped: deque[tuple[str, Mailbox]] = deque()  # of collected streams: the next call aborts their requests
        try:
            self.engine_core = table["wiring"](self.config, table, self.tracer)
            check_built(self.engine_core, self.parts)
        except BaseException:
            self.tracer.close()
            raise

    # --- whole answers ------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: Params = None, *, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Answer one prompt (text or token ids) and return the finished output."""
        with self._open(self._request(prompt, params, request_id, options), final_only=True) as outputs:
            return next(outputs)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[SamplingParams] = None,
        *,
        progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, RequestOutput]:
        """Answer several prompts; returns finished outputs by request id, in order of submission.

        `params` is one for all or one per prompt, each of `options` one for all. A prompt that cannot run gets an
        output with `finish_reason="error"`; the others run. `progress` shows a bar on a terminal (stderr): None does so
        if it takes more than a second.
        """
        each = _one_per_prompt(prompts, params)
        self._check_options(options)
        valid("progress", progress, bool | None, InvalidRequestError)
        results: dict[str, RequestStream | RequestOutput] = {}
        try:
            for prompt, own in zip(prompts, each, strict=True):
                request_id = self._new_id()
                try:
                    results[request_id] = self._open(self._request(prompt, own, request_id, options), final_only=True)
                except InvalidRequestError as error:
                    self._number += 1
                    results[request_id] = rejected_output(request_id, prompt, error)
            streams = {rid: result for rid, result in results.items() if isinstance(result, RequestStream)}
            with _progress_bar(len(results), len(results) - len(streams), progress) as bar:
                while streams:  # every request ends, so this does
                    for request_id in self._advance():
                        if request_id in streams:
                            results[request_id] = next(streams.pop(request_id))
                            bar.update()
            return {rid: result for rid, result in results.items() if isinstance(result, RequestOutput)}
        finally:
            for result in results.values():
                if isinstance(result, RequestStream):
                    result.close()

    def chat(
        self,
        messages: Sequence[Message],
        params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Answer a conversation: `[{"role": "user", "content": "..."}, ...]`, put through the model's chat template."""
        prompt = self.chat_prompt(messages, chat_template_kwargs=chat_template_kwargs)
        return self.generate(prompt, params, request_id=request_id, **options)

    def chat_prompt(
        self, messages: Sequence[Message], *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids that `chat` would run: for `stream` and `add_request`, which take any prompt."""
        self._check_usable()
        return self.engine_core.input_processor.apply_chat_template(messages, chat_template_kwargs)

    # --- as it comes --------------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: Params = None, *, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> RequestStream:
        """Queue a prompt now and iterate over its `RequestOutput` so far, one per step that added tokens.

        Several streams may be open at once, beside `step()`. Closing one early aborts its request.
        """
        return self._open(self._request(prompt, params, request_id, options))

    # --- step by step -------------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: Params = None, *, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Queue a prompt and return its request id; `step()` reports it. Raises before anything changes."""
        return self._queue(self._request(prompt, params, request_id, options))

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of the requests of `add_request` that changed, `{}` on an idle engine.

        Outputs of streams go to their streams.
        """
        self._check_usable()
        if self.engine_core.has_unfinished_requests() or not self._outputs:
            self._advance()
        outputs, self._outputs = self._outputs, {}
        return outputs

    def abort_request(self, request_id: str) -> bool:
        """End a request, in whatever state it is: the next step reports `finish_reason="abort"`.

        Returns False if no unfinished request has exactly this id, or if it is to end already.
        """
        self._begin_call()
        if self._closed or not isinstance(request_id, str):
            return False
        with self.engine_core.changing():
            return self.engine_core.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step()` has anything to compute or to report."""
        self._begin_call()
        return not self._closed and (self.engine_core.has_unfinished_requests() or bool(self._outputs))

    def stats(self) -> EngineStats:
        """Return totals since the engine was built, and the current number of requests and KV tokens."""
        self._begin_call()
        return self.engine_core.stats()

    def close(self) -> None:
        """Release all memory. Open requests end without a further output; the engine cannot be used any more."""
        if self._closed:
            return
        self._check_usable()
        with self.engine_core.changing():
            try:
                self.engine_core.close()
            except Exception:
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        self._outputs, self._mailboxes = {}, {}
        self.tracer.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: Params, request_id: str | None, options: RequestOptions) -> Request:
        """Build a request from checked values; nothing is queued."""
        self._check_usable()
        self._check_options(options)
        if request_id is None:
            request_id = self._new_id()
        check_name("request_id", request_id)
        if self._is_taken(request_id):
            raise DuplicateRequestError(f"request id {shown(request_id)} is in use: unfinished, or its end not fetched")
        params = SamplingParams() if params is None else params
        now, processor = time.monotonic(), self.engine_core.input_processor
        return processor.process_request(request_id, prompt, params, number=self._number, arrival_time=now, **options)

    def _open(self, request: Request, *, final_only: bool = False) -> RequestStream:
        """Queue a request and return its stream; with `final_only`, the stream has the last output alone."""
        request.final_only = final_only
        stream = RequestStream(
            request.request_id, read=self._next_output, close=self._close_stream, drop=self._dropped.append
        )
        self._queue(request, stream.mailbox)
        return stream

    def _queue(self, request: Request, mailbox: Mailbox | None = None) -> str:
        request_id = request.request_id
        try:
            with self.engine_core.changing():
                self.engine_core.add_request(request)
                self._number += 1
                if mailbox is not None:
                    self._mailboxes[request_id] = mailbox
        except EngineError:  # rejected before any change
            raise
        except BaseException:  # Ctrl-C, for example: the caller gets no id, so the request is aborted
            with self.engine_core.changing():
                if self.engine_core.abort_request(request_id):
                    self._mailboxes[request_id] = ABANDONED
            raise
        return request_id

    def _new_id(self) -> str:
        """Return a free id for a request that names none; the user may have taken the obvious one."""
        while self._is_taken(f"req-{self._number}"):
            self._number += 1
        return f"req-{self._number}"

    def _is_taken(self, request_id: str) -> bool:
        """Return whether a request with this id is unfinished, or its last output was not fetched yet."""
        is_fetched = request_id not in self._outputs and request_id not in self._mailboxes
        return self.engine_core.is_unfinished(request_id) or not is_fetched

    def _next_output(self, request_id: str, mailbox: Mailbox) -> RequestOutput | None:
        """Run steps until the mailbox of a stream has an output; return it. None if the stream was closed."""
        self._check_usable()
        while not mailbox:
            if self._mailboxes.get(request_id) is not mailbox:
                self.engine_core.check_alive()
                return None
            self._advance()
        if mailbox[0].finished and self._mailboxes.get(request_id) is mailbox:
            del self._mailboxes[request_id]
        return mailbox[0]

    def _close_stream(self, request_id: str, mailbox: Mailbox) -> None:
        self._begin_call()
        self._abandon(request_id, mailbox)

    def _abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort the request of a stream that is not read any more, unless the request has ended."""
        if self._mailboxes.get(request_id) is mailbox:
            with self.engine_core.changing():
                self._mailboxes[request_id] = ABANDONED
                self.engine_core.abort_request(request_id)
                if mailbox and mailbox[-1].finished:
                    del self._mailboxes[request_id]

    def _advance(self) -> list[str]:
        """Run one step and deliver its outputs; return the ids of the requests that have one."""
        self._check_usable()
        with self.engine_core.changing():
            outputs: dict[str, RequestOutput] = self.engine_core.run_step()
            for request_id, output in outputs.items():
                mailbox = self._mailboxes.get(request_id)
                if mailbox is None:
                    self._outputs[request_id] = output
                elif mailbox is not ABANDONED:
                    mailbox.append(output)
                elif output.finished:
                    del self._mailboxes[request_id]
        return list(outputs)

    def _check_options(self, options: RequestOptions) -> None:
        for name in options:
            if name not in self.request_options:
                known = ", ".join(["request_id", *self.request_options])
                raise InvalidRequestError(f"{name}= is unknown here: a request of this milestone takes {known}")

    def _begin_call(self) -> None:
        """Check where a call comes from, and abort the requests of streams that were dropped since the last one."""
        if os.getpid() != self._process:  # a fork of it shares memory and device with the engine
            raise EngineUsageError("an engine belongs to the process that built it; start a new process")
        if threading.get_ident() != self._thread:
            raise EngineUsageError("an engine belongs to the thread that built it; this call came from another thread")
        if self.engine_core.was_interrupted:  # then it is dead
            self._outputs, self._mailboxes = {}, {}
        while self._dropped and not self.engine_core.is_changing:
            self._abandon(*self._dropped[0])
            self._dropped.popleft()

    def _check_usable(self) -> None:
        self._begin_call()
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.engine_core.is_changing:
            raise EngineUsageError("the engine is inside another call; a trace reader must not call it")


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """A bar without tqdm's monitor thread."""

    monitor_interval = 0


def _progress_bar(total: int, finished: int, show: bool | None) -> ProgressBar:
    """Return a bar on stderr that disappears at its end. `show=None`: on a terminal, for a long batch."""
    if sys.stderr is None or sys.stderr.closed:
        show = False
    disable, delay = (None, PATIENCE) if show is None else (not show, 0.0)
    return ProgressBar(total=total, initial=finished, desc="requests", leave=False, disable=disable, delay=delay)


def _one_per_prompt(prompts: Sequence[Prompt], params: Params | Sequence[SamplingParams]) -> list[Params]:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompts must be a list of at most {MAX_PROMPTS:,} prompts, not {shown(prompts)}")
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidRequestError(f"params must be SamplingParams or a list of them, not {shown(params)}")
    if len(params) != len(prompts):
        raise InvalidRequestError(f"{len(params)} params for {len(prompts)} prompts: give one for all, or one for each")
    return list(params)
