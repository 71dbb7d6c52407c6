"""The engine on asyncio: many callers, none of which waits for another.

    from m7_serving import AsyncLLM, SamplingParams

    async with await AsyncLLM.start() as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.text)

Outputs are those of `LLMEngine.stream`; a reader that is slower than the engine gets fewer of them, each with
everything so far. Closing the generator, or cancelling the task that reads it, aborts the request. Who does what:

    event loop         mailboxes, and whatever the callers do
    tokenizer thread   chat templates, tokens and checks of one call after the other; images, unless
                       `num_media_processes` is set or the request has options for the template
    core thread        the router of a group: sends requests to engines, makes texts of their tokens (`core_thread.py`)
    engine processes   steps

A group is a router in this process and one or more engine processes. Without a `DisaggregationConfig` it has one
engine, of the role `both`: it computes prompts and answers. New in this milestone. vLLM: `AsyncLLM`; SGLang:
`TokenizerManager`, and `DetokenizerManager` for the texts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from m1_single_request.config import assemble_config
from m1_single_request.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineUsageError,
    InvalidRequestError,
    PromptTooLongError,
    shown,
)
from m1_single_request.field_rules import PositiveInt, valid
from m1_single_request.input_processor import InputProcessor, Prompt, RequestOptions, check_name
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.router_core import RouterCore
from m6_multimodal_pd.disaggregation.runtime.processes import END_TIMEOUT_S
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.outputs import EngineStats
from m7_serving.core_thread import CoreThread, fail, finish
from m7_serving.errors import EngineUnavailableError, ServerBusyError
from m7_serving.mailbox import Mailbox

T = TypeVar("T")
ONE_ENGINE = DisaggregationConfig(both=1)
END_S = END_TIMEOUT_S + 2.0
"""Seconds for the end of the core thread, of which the engine processes have most before they are killed."""
PAUSE_S = 0.02
"""Seconds between two looks at what is unfinished."""


class AsyncLLM:
    """An engine, or a group of engines, for the event loop in which it was started. Also an async context manager."""

    def __init__(self, config: EngineConfig, max_requests: int) -> None:
        """Begin to build the engine; see `start`."""
        self.config, self.max_requests = config, max_requests
        self.num_unfinished = 0
        """Number of outputs that were admitted and have not ended, also of prompts that are being tokenized."""
        self._thread = CoreThread(config, self._deliver)
        self._thread.ended.add_done_callback(self._end)
        self._tokenizer = ThreadPoolExecutor(1, "tokenizer")
        self._mailboxes: dict[str, Mailbox] = {}
        self._reading: asyncio.Future[Any] | None = None
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._numbers = count()
        self.end_error: Exception | None = None
        """Once no engine will answer any more: the error that unfinished and new requests raise."""
        self._thread.start()

    @classmethod
    async def start(cls, model: str | Path | None = None, *, max_requests: int = 256, **configs: Any) -> "AsyncLLM":
        """Load a model, and return when its engines are ready. The arguments are those of `LLMEngine`, less `parts`.

        `max_requests`: number of outputs (`n` of each prompt) that may be unfinished at the same time. Raises
        `ConfigError`, and the errors of building an engine.
        """
        valid("max_requests", max_requests, PositiveInt, ConfigError)
        config = assemble_config(EngineConfig, DEFAULT_MODEL, model, configs)
        llm = cls(replace(config, disaggregation=config.disaggregation or ONE_ENGINE), max_requests)
        try:
            await llm._thread.ready
        except BaseException:
            llm._thread.stop()
            raise
        return llm

    @property
    def input_processor(self) -> InputProcessor:
        """The tokenizer, the chat template, and the limits of the model."""
        return self._thread.core.input_processor

    @property
    def is_serving(self) -> bool:
        """Whether the engines can answer now."""
        return self._thread.is_serving

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt (text, token ids or messages); yield its output so far whenever there is more of it.

        Raises as `LLMEngine.generate` before anything is queued, and `ServerBusyError` or `EngineUnavailableError`:
        when the first output is requested. A request that fails later ends with an output with the error.
        """
        outputs = self.generate_batch([prompt], params, request_id=request_id, **options)
        try:
            async for changed in outputs:
                yield changed[0]
        finally:
            await outputs.aclose()

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        final_only: bool = False,
        must_fit: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[dict[int, RequestOutput], None]:
        """Answer several prompts, of which all or none are admitted; yield the new outputs by index of the prompt.

        `final_only`: yield only finished outputs. `must_fit`: reject a prompt that leaves no room for `max_tokens`.
        Raises as `generate`. With several prompts their ids are the request id with `-0`, `-1` ...
        """
        params = params or SamplingParams()
        num_outputs = len(prompts) * params.n
        self.check_admissible(num_outputs)
        self.num_unfinished += num_outputs
        try:
            make = partial(self._requests, list(prompts), params, request_id, must_fit, options)
            requests = await self.in_tokenizer_thread(make)
            await self._may_start.wait()
            self.check_admissible(0)  # the engine may have been lost meanwhile
            mailbox = self._open(requests, final_only)
            try:
                while changed := await mailbox.take():
                    yield changed
            finally:
                self._abort(list(mailbox.unfinished))
        finally:
            self.num_unfinished -= num_outputs

    async def in_tokenizer_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the tokenizer thread: on the event loop it would stop all streams for milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer, function, *arguments)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """Return the totals of all engines, as `LLMEngine.stats`. Raises `EngineClosedError`, or the error with which
        the engines have ended."""
        if self._reading is None or self._reading.done():  # each reading takes a step: callers share it
            self._reading = asyncio.ensure_future(self.call(RouterCore.stats))
        return await asyncio.shield(self._reading)

    async def pause(self) -> None:
        """Let new requests wait for `resume`; return when those that run have ended. Raises `EngineUsageError` if
        `resume` is called before."""
        self._may_start.clear()
        is_busy = True
        while is_busy or self._mailboxes:
            await asyncio.sleep(PAUSE_S)
            is_busy = await self.call(RouterCore.has_unfinished_requests)
            if self._may_start.is_set():
                raise EngineUsageError("new requests were started before the running ones had ended")

    def resume(self) -> None:
        """Start the requests that wait since `pause`."""
        self._may_start.set()

    async def call(self, function: Callable[[RouterCore], T]) -> T:
        """Call a function with the router core, between two of its steps; return its value, or raise its error. Nobody
        gets output while it runs."""
        self._check_open()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(core: RouterCore) -> None:
            try:
                value = function(core)
            except Exception as error:
                self._thread.post(fail, answer, error)
            else:
                self._thread.post(finish, answer, value)

        self._thread.submit(run)
        futures: list[asyncio.Future[Any]] = [answer, self._thread.ended]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)  # after the end no call is executed
        finally:
            answer.cancel()  # if it is not done
        self._check_open()
        return answer.result()

    async def close(self) -> None:
        """End all engines; unfinished requests raise `EngineClosedError`. May be called twice.

        Engines whose router hangs, in a call for weights that cannot be read for example, end with this process.
        """
        self._end_all(EngineClosedError("the engine was closed"))
        self._thread.stop()
        await asyncio.wait([self._thread.ended], timeout=END_S)  # it may hold an error
        finish(self._thread.ended, None)  # if it hangs
        self._tokenizer.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.end_error is not None:
            raise self.end_error

    def check_admissible(self, num_outputs: int) -> None:
        """Raise an error unless so many more outputs can be admitted now."""
        self._check_open()
        if not self.is_serving:
            raise EngineUnavailableError("the engine was lost and is being started again: try again in some seconds")
        if num_outputs > self.max_requests:
            raise InvalidRequestError(f"{num_outputs} outputs of one call exceed max_requests={self.max_requests}")
        if self.num_unfinished + num_outputs > self.max_requests:
            raise ServerBusyError(
                f"{self.num_unfinished} outputs are unfinished, and max_requests is {self.max_requests}: try later"
            )

    def _requests(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        request_id: str | None,
        must_fit: bool,
        options: RequestOptions,
    ) -> list[Request]:
        """Tokenize and check prompts, and return their requests. Runs on the tokenizer thread."""
        for name in options:
            if name not in LLMEngine.request_options:
                known = ", ".join(["request_id", *LLMEngine.request_options])
                raise InvalidRequestError(f"{name}= is unknown here: a request takes {known}")
        if request_id is not None:
            check_name("request_id", request_id)
        requests = []
        for index, prompt in enumerate(prompts):
            number = next(self._numbers)
            own = (
                f"req-{number}" if request_id is None else request_id if len(prompts) == 1 else f"{request_id}-{index}"
            )
            requests.append(
                self.input_processor.process_request(
                    own, prompt, params, number=number, arrival_time=time.monotonic(), **options
                )
            )
            num_tokens, longest = len(requests[-1].prompt_token_ids), self.input_processor.max_model_len
            if must_fit and num_tokens + params.max_tokens > longest:
                raise PromptTooLongError(
                    f"{num_tokens} prompt tokens and max_tokens={params.max_tokens} exceed max_model_len={longest}"
                )
        return requests

    def _open(self, requests: list[Request], final_only: bool) -> Mailbox:
        """Queue requests, and return their mailbox. Raises `DuplicateRequestError` for an id that is in use here."""
        mailbox = Mailbox([request.request_id for request in requests])
        for request in requests:
            request.final_only = final_only
            if request.request_id in self._mailboxes:
                raise DuplicateRequestError(f"request id {shown(request.request_id)} is in use: unfinished")
        self._mailboxes |= dict.fromkeys(mailbox.unfinished, mailbox)

        def add(core: RouterCore) -> None:
            added: list[str] = []
            try:
                with core.changing():
                    for request in requests:
                        core.add_request(request)
                        added.append(request.request_id)
            except Exception as error:  # an id of another request's child, for example
                for request_id in added:
                    core.abort_request(request_id)
                self._thread.post(self._fail, mailbox, error)

        self._thread.submit(add)
        return mailbox

    def _abort(self, request_ids: list[str]) -> None:
        """Abort requests whose outputs nobody reads any more. Does not wait for it: an id is in use until the end."""
        if not request_ids:
            return

        def abort(core: RouterCore) -> None:
            with core.changing():
                for request_id in request_ids:
                    core.abort_request(request_id)

        self._thread.submit(abort)

    def _deliver(self, outputs: dict[str, RequestOutput]) -> None:
        """Put the newest outputs into the mailboxes of their callers, some of which nobody reads any more."""
        for request_id, output in outputs.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.put(output)
                if output.finished:
                    del self._mailboxes[request_id]

    def _fail(self, mailbox: Mailbox, error: Exception) -> None:
        for request_id in mailbox.unfinished:
            self._mailboxes.pop(request_id, None)
        mailbox.fail(error)

    def _end(self, ended: "asyncio.Future[None]") -> None:
        """End the calls of all callers: the engines have ended."""
        error = ended.exception()
        self._end_all(error if isinstance(error, Exception) else EngineClosedError("the engine was closed"))

    def _end_all(self, error: Exception) -> None:
        self.end_error = self.end_error or error
        self._may_start.set()
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(error)
        self._mailboxes.clear()
