"""An `AsyncLLM` without an engine: its outputs are made by m1's own parts from tokens that a test has chosen."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence as SequenceOf
from contextlib import aclosing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from msgspec.structs import replace

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import InvalidPromptError
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import BaseFinishReason, Request, Sequence
from m1_single_request.sampler import LogprobRow
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import StopChecker
from m7_serving.openai import chat, completions
from m7_serving.openai.deltas import MakeGeneration
from m7_serving.openai.requests import ChatCompletionRequest
from tests.m1_single_request.helpers import byte_tokens, real_tokenizer

MAX_MODEL_LEN = 256
Batch = dict[int, RequestOutput]


def ids_of(text: str | bytes) -> list[int]:
    """One token per byte, so that a character may need several."""
    data = text.encode() if isinstance(text, str) else text
    return [byte_tokens()[byte] for byte in data]


def row_of(token_id: int, position: int, num_best: int) -> LogprobRow:
    """A made-up row: at every other position the token is the most likely one, elsewhere none of the best."""
    best = [(token_id + position % 2 + i) % 256 for i in range(num_best)]
    values = [-0.25 * (i + 1) for i in range(num_best)]
    own = values[0] if position % 2 == 0 and num_best else -7.0
    return LogprobRow((token_id, *best), (own, *values), (num_best + 1, *range(1, num_best + 1)))


def outputs_of(
    tokens: SequenceOf[int],
    params: SamplingParams,
    *,
    prompt: SequenceOf[int] = (1, 2, 3),
    end: BaseFinishReason | None = None,
    cached_tokens: int = 0,
) -> list[RequestOutput]:
    """The outputs of an engine that samples these tokens, one per step. `end`: the reason after the last of them."""
    tokenizer = real_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    sequence = Sequence("req", list(prompt), params, detokenizer)
    request = Request("req", None, sequence, 0, 0.0)
    request.cached_tokens = cached_tokens
    if params.prompt_logprobs is not None:
        sequence.add_prompt_logprobs([row_of(t, i, params.prompt_logprobs) for i, t in enumerate(prompt[1:])])
    checker = StopChecker(eos_token_ids=[tokenizer.eos_token_id], max_model_len=MAX_MODEL_LEN)
    outputs = []
    for position, token_id in enumerate(tokens):
        verdict = checker.check(sequence, [token_id])
        rows = None if params.logprobs is None else sequence.named(row_of(token_id, position, params.logprobs))
        sequence.add_token_id(token_id, rows)
        sequence.text_end, request.finish_reason = verdict.text_end, verdict.finish_reason
        if position == len(tokens) - 1 and end is not None:
            request.finish_reason = end
        outputs.append(OutputProcessor().make_output(request))
        if request.finish_reason is not None:
            break
    return outputs


def family(children: SequenceOf[SequenceOf[RequestOutput]]) -> list[RequestOutput]:
    """The outputs of a request with `n` children that run side by side."""
    outputs = []
    for step in range(max(map(len, children))):
        newest = [child[min(step, len(child) - 1)] for child in children]
        finished = all(output.finished for output in newest)
        completions = tuple(replace(output.outputs[0], index=i) for i, output in enumerate(newest))
        error = next((output.error for output in newest if output.error), None) if finished else None
        outputs.append(replace(newest[0], outputs=completions, finished=finished, error=error))
    return outputs


def batches_of(prompts: SequenceOf[SequenceOf[RequestOutput]]) -> list[Batch]:
    """What `generate_batch` yields if nothing is merged: one batch per step."""
    steps = range(max(map(len, prompts)))
    return [{i: outputs[s] for i, outputs in enumerate(prompts) if s < len(outputs)} for s in steps]


def merged(batches: SequenceOf[Batch], keep: SequenceOf[bool]) -> list[Batch]:
    """What a slow reader gets: where `keep` is false, a batch waits, and newer outputs replace those in it."""
    found: list[Batch] = []
    waiting: Batch = {}
    for i, batch in enumerate(batches):
        waiting |= batch
        if i >= len(keep) or keep[i] or i == len(batches) - 1:
            found.append(waiting)
            waiting = {}
    return found


class ScriptedLLM:
    """Yields the batches of a script, and keeps the arguments of its calls."""

    def __init__(self, batches: SequenceOf[Batch | Exception] = (), tokenizer: Any = None) -> None:
        self.batches = batches
        self.calls: list[dict[str, Any]] = []
        self.is_closed = False
        self.threaded: list[str] = []
        self.input_processor = SimpleNamespace(
            tokenizer=tokenizer or real_tokenizer(),
            vocab_size=len(real_tokenizer()),
            max_model_len=MAX_MODEL_LEN,
            apply_chat_template=self._apply_chat_template,
            encode=self._encode,
        )

    async def generate_batch(
        self, prompts: Any, params: SamplingParams, *, final_only: bool = False, **options: Any
    ) -> AsyncGenerator[Batch, None]:
        """As `AsyncLLM`'s; an exception in the script is raised there."""
        self.calls.append({"prompts": prompts, "params": params, **options})
        try:
            for batch in self.batches:
                await asyncio.sleep(0)
                if isinstance(batch, Exception):
                    raise batch
                found = {i: output for i, output in batch.items() if output.finished or not final_only}
                if found:
                    yield found
        finally:
            self.is_closed = True

    def check_admissible(self, num_outputs: int) -> None:
        """Admit all."""

    async def in_tokenizer_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function at once."""
        self.threaded.append(function.__name__)
        return function(*arguments)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = real_tokenizer().encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _apply_chat_template(self, messages: Any, options: Any = None) -> list[int]:
        if options and "unknown" in options:
            raise InvalidPromptError("chat_template_kwargs: the template has no variable 'unknown'")
        text = real_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._encode(str(text), add_special_tokens=False)


def endpoint_call(llm: Any, request: Any, **names: Any) -> MakeGeneration:
    """What the route of a request's endpoint passes on."""
    endpoint = chat if isinstance(request, ChatCompletionRequest) else completions
    return partial(endpoint.generation, llm, request, **names)


async def collected(chunks: AsyncGenerator[dict[str, Any], None]) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


class Watched:
    """A `Watch` that keeps what it receives."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self.outputs: Batch = {}
        self.error: BaseException | None = None

    @contextmanager
    def __call__(self, num_prompts: int) -> Iterator[Callable[[int, RequestOutput], None]]:
        """Watch one call."""
        self.num_prompts = num_prompts
        try:
            yield self.outputs.__setitem__
        except BaseException as error:
            self.error = error
            raise


class Joined(NamedTuple):
    text: str
    logprobs: Any
    finish_reason: str
    stop_reason: Any


def joined_chat(chunks: SequenceOf[dict[str, Any]]) -> dict[int, Joined]:
    """The choices of a stream, by index; checks the order of their chunks."""
    choices = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    found = {}
    for index, (first, *middle, last) in choices.items():
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert last["delta"] == {} and last["finish_reason"] in ("stop", "length") and last["logprobs"] is None
        assert all(choice["finish_reason"] is None and set(choice["delta"]) == {"content"} for choice in middle)
        assert all(choice["delta"]["content"] or choice["logprobs"] for choice in middle)
        text = "".join(choice["delta"]["content"] for choice in middle)
        rows = [row for choice in middle if choice["logprobs"] for row in choice["logprobs"]["content"]]
        found[index] = Joined(text, rows, last["finish_reason"], last["stop_reason"])
    return found


def joined_text(chunks: SequenceOf[dict[str, Any]]) -> dict[int, Joined]:
    choices = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]].append(choice)
    found = {}
    for index, (*parts, last) in choices.items():
        assert last["text"] == "" and last["finish_reason"] in ("stop", "length") and last["logprobs"] is None
        assert all(part["finish_reason"] is None and (part["text"] or part["logprobs"]) for part in parts)
        logprobs: dict[str, list[Any]] = defaultdict(list)
        for part in parts:
            for name, values in (part["logprobs"] or {}).items():
                logprobs[name] += values
        text = "".join(part["text"] for part in parts)
        found[index] = Joined(text, dict(logprobs) or None, last["finish_reason"], last["stop_reason"])
    return found
