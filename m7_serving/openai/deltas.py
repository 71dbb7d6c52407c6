"""Answers and chunks of a stream, from the outputs of the engine; both endpoints use it.

An output has everything so far. A delta is what is new since the one before, per choice; a whole answer is the first
delta of a finished request. So both modes have the same text and log-probabilities by construction. New in this
milestone. vLLM: the `*_stream_generator` methods of its serving classes, with `RequestOutputKind.DELTA`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from m1_single_request.input_processor import Prompt
from m1_single_request.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from m1_single_request.sampling_params import SamplingParams
from m7_serving.async_llm import AsyncLLM
from m7_serving.errors import EngineUnavailableError
from m7_serving.openai.params import must_fit, options
from m7_serving.openai.requests import GenerationRequest, StreamOptions
from m7_serving.openai.usage import Watch, usage

FAILED = ("abort", "error")


@dataclass(frozen=True)
class Generation:
    """One HTTP call: what goes to the engine, and how its answer is made of the deltas."""

    llm: AsyncLLM
    request: GenerationRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    head: Mapping[str, Any]
    """`id`, `object`, `created`, `model`; the id is also that of the engine's request."""
    watch: Watch
    choice_of: Callable[["Delta"], dict[str, Any]]
    """Makes a choice of a whole answer."""
    pieces_of: Callable[["Delta"], Iterable[dict[str, Any]]]
    """Makes the choices of chunks, each with a part of the delta."""
    returns_output: bool = True
    """False: the output of the engine is dropped, and the prompt alone is returned."""

    async def outputs(self, *, final_only: bool) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of the engine, each with the index of its prompt.

        Raises as `AsyncLLM.generate_batch`, and the error of a request that failed or was aborted by the server.
        """
        batches = self.llm.generate_batch(
            self.prompts,
            self.params,
            request_id=self.head["id"],
            final_only=final_only,
            must_fit=must_fit(self.request),
            **options(self.request),
        )
        async with aclosing(batches):
            with self.watch(len(self.prompts)) as observe:
                async for batch in batches:
                    for index, output in batch.items():
                        check(output)
                        shown = output if self.returns_output else without_output(output)
                        observe(index, shown)
                        yield index, shown


MakeGeneration = Callable[[], Awaitable[Generation]]
"""Reads a request, and returns its call."""


class Delta(NamedTuple):
    """New part of a choice."""

    choice: int
    """Index of the choice: index of the prompt * n + number of the output."""
    prompt: int
    """Its index."""
    output: RequestOutput
    is_first: bool
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    """Of `token_ids`; None if they were not requested."""
    finish_reason: str | None
    """In the last delta: `stop` or `length`."""
    stop_reason: int | str | None


class Deltas:
    """The deltas of all choices of one call."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.outputs: dict[int, RequestOutput] = {}
        """Newest output by index of the prompt."""
        self._sent: dict[int, tuple[int, int]] = {}  # index of a choice -> numbers of characters and tokens
        self._finished: set[int] = set()

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        """Yield a delta for each choice of a prompt that has not finished before."""
        self.outputs[prompt] = output
        if not self._has_prompt_logprobs(output):
            return
        for completion in output.outputs:
            index = prompt * self.params.n + completion.index
            if index in self._finished or completion.finish_reason in FAILED:  # `check` raises once all have ended
                continue
            characters, tokens = self._sent.get(index, (0, 0))
            yield Delta(
                index,
                prompt,
                output,
                is_first=index not in self._sent,
                text=completion.text[characters:],
                token_ids=completion.token_ids[tokens:],
                logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            self._sent[index] = len(completion.text), len(completion.token_ids)
            if completion.finish_reason is not None:
                self._finished.add(index)

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return usage(self.outputs.values())

    def _has_prompt_logprobs(self, output: RequestOutput) -> bool:
        """Return whether the log-probabilities of the prompt are there, if requested: one of `n` choices computes
        them."""
        known = len(output.prompt_logprobs or ())
        return self.params.prompt_logprobs is None or known == len(output.prompt_token_ids)


async def answer(make: MakeGeneration) -> dict[str, Any]:
    """Return the body of an answer. Raises the errors of `make`, and as `Generation.outputs`."""
    call = await make()
    deltas = Deltas(call.params)
    found: list[Delta] = []
    async with aclosing(call.outputs(final_only=True)) as outputs:
        async for prompt, output in outputs:
            found += deltas.of(prompt, output)
    found.sort(key=lambda delta: delta.choice)
    return {**call.head, "choices": list(map(call.choice_of, found)), "usage": deltas.usage()}


async def chunks(make: MakeGeneration) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of an answer, the first one once the engine has a token, and the usage last.

    Raises as `answer`: before the first chunk for a request that cannot run, later for one that failed.
    """
    call = await make()
    wanted = call.request.stream_options or StreamOptions()
    deltas = Deltas(call.params)
    async with aclosing(call.outputs(final_only=False)) as outputs:
        async for prompt, output in outputs:
            for delta in deltas.of(prompt, output):
                for choice in call.pieces_of(delta):
                    chunk = {**call.head, "choices": [choice]}
                    if wanted.include_usage or wanted.continuous_usage_stats:
                        chunk["usage"] = deltas.usage() if wanted.continuous_usage_stats else None
                    yield chunk
    if wanted.include_usage:
        yield {**call.head, "choices": [], "usage": deltas.usage()}


def check(output: RequestOutput) -> None:
    """Raise the error of a request that failed, or `EngineUnavailableError` for one that the server aborted."""
    if isinstance(output.error, Exception):
        raise output.error
    if output.finished and any(completion.finish_reason in FAILED for completion in output.outputs):
        raise EngineUnavailableError("the server ended this request before its end") from output.error


def without_output(output: RequestOutput) -> RequestOutput:
    """Return an output without generated tokens."""

    def emptied(completion: CompletionOutput) -> CompletionOutput:
        reason = "length" if completion.finish_reason == "stop" else completion.finish_reason
        return replace(completion, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)

    return replace(output, outputs=tuple(map(emptied, output.outputs)))
