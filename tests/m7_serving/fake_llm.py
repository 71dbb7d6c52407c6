"""An `AsyncLLM` without an engine: a test decides when tokens come, and sees when a request ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from m1_single_request.errors import EngineClosedError
from m1_single_request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from m6_multimodal_pd.config import DEFAULT_MODEL
from m6_multimodal_pd.outputs import EngineStats

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4
Pause = Callable[[], Awaitable[Any]]


async def at_once() -> None:
    """A phase that takes no time."""


async def never() -> None:
    """A phase that does not end."""
    await asyncio.Event().wait()


class FakeLLM:
    """Answers every prompt with `num_tokens` letters."""

    def __init__(self, num_tokens: int = 3) -> None:
        self.config = SimpleNamespace(model=SimpleNamespace(model=DEFAULT_MODEL))
        tokenizer = SimpleNamespace(chat_template="")
        self.input_processor = SimpleNamespace(tokenizer=tokenizer, max_model_len=4096, vocab_size=1000)
        self.num_tokens = num_tokens
        self.is_serving, self.is_closed = True, False
        self.end_error: Exception | None = None
        self.num_unfinished = 0
        self.admission: Pause = at_once
        """Awaited before a request is queued: it may raise."""
        self.first, self.next = at_once, at_once
        """Awaited before the first token, and before each other one."""
        self.error: Exception | None = None
        """Of the last output, in place of `length`."""
        self.padding = ""
        """Further text of each token."""
        self.widths: list[int] = []
        """Number of outputs of each admitted call."""
        self.ends: list[float] = []
        """Times at which generators ended, in monotonic seconds."""
        self.end = asyncio.Event()

    async def generate_batch(
        self, prompts: Any, params: Any, *, request_id: str, final_only: bool = False, **_: Any
    ) -> AsyncGenerator[dict[int, RequestOutput], None]:
        self.num_unfinished += len(prompts)
        start, first = time.monotonic(), None
        try:
            await self.open(self.admission)
            self.widths.append(params.n)
            for num_tokens in range(1, self.num_tokens + 1):
                await self.open(self.first if num_tokens == 1 else self.next)
                first = first or time.monotonic()
                is_last = num_tokens == self.num_tokens
                if is_last or not final_only:
                    made = [self.output(request_id, prompt, params.n, num_tokens, start, first) for prompt in prompts]
                    yield dict(enumerate(made))
        finally:
            self.num_unfinished -= len(prompts)
            self.ends.append(time.monotonic())
            self.end.set()

    def check_admissible(self, num_outputs: int) -> None:
        """Everything may come."""

    def resume(self) -> None:
        """Nothing waits."""

    async def open(self, pause: Pause) -> None:
        """Wait for the test, or for the end of the engine."""
        tasks = [asyncio.ensure_future(pause()), asyncio.ensure_future(self._closing())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()

    async def _closing(self) -> None:
        while not self.is_closed:
            await asyncio.sleep(0.01)
        raise EngineClosedError("the engine was closed")

    def output(self, request_id: str, prompt: Any, n: int, num: int, start: float, first: float) -> RequestOutput:
        """Return the output after `num` tokens."""
        is_last = num == self.num_tokens
        reason = None if not is_last else "length" if self.error is None else "error"
        text, token_ids = TEXT[:num] + self.padding * num, tuple(range(num))
        completions = [CompletionOutput(index, text, token_ids, None, None, reason) for index in range(n)]
        prompt_ids = tuple(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else (1, 2, 3)
        metrics = RequestMetrics(start, first, time.monotonic() if is_last else None, len(prompt_ids), 2, num * n)
        error = self.error if is_last else None
        return RequestOutput(request_id, None, prompt_ids, None, tuple(completions), is_last, metrics, error)

    async def in_tokenizer_thread(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    async def stats(self) -> EngineStats:
        if self.end_error is not None:
            raise self.end_error
        names = EngineStats.__dataclass_fields__
        values = dict.fromkeys(names, 0) | {"max_total_tokens": 100, "available_size": 70, "evictable_size": 20}
        return EngineStats(**values | {"num_running": self.num_unfinished})  # type: ignore[arg-type]

    async def close(self) -> None:
        self.is_closed, self.end_error = True, self.end_error or EngineClosedError("the engine was closed")

    async def __aenter__(self) -> "FakeLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
