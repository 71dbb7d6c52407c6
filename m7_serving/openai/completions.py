"""`/v1/completions`: the continuations of prompts, whole or in chunks.

A request may have several prompts. Choice `i` continues prompt `i // n`. With `echo` the prompt is the first part of
every choice; with `max_tokens=0` it is the only part, which gives the log-probabilities of a text (lm-eval scores
models this way). New in this milestone. vLLM: `entrypoints/openai/completion`; SGLang: `serving_completions.py`.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from m1_single_request.input_processor import check_model_len
from m1_single_request.outputs import TokenLogprobs
from m7_serving.async_llm import AsyncLLM
from m7_serving.openai.deltas import Delta, Generation
from m7_serving.openai.logprobs import completion_logprobs
from m7_serving.openai.params import completion_params
from m7_serving.openai.requests import CompletionRequest
from m7_serving.openai.tokens import check_token_ids, decode
from m7_serving.openai.usage import Watch


async def generation(
    llm: AsyncLLM, request: CompletionRequest, *, model: str, request_id: str, watch: Watch
) -> Generation:
    """Return the call of the engine that continues prompts. `model`: the name that is served.

    Raises a subclass of `InvalidRequestError`, and the errors of `AsyncLLM.check_admissible`.
    """
    prompts: Sequence[str | list[int]] = request.prompt
    llm.check_admissible(len(prompts) * request.n)
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            check_model_len(prompt, llm.input_processor.max_model_len, f"cmpl-{request_id}")
            check_token_ids(prompt, llm.input_processor.vocab_size, f"prompt[{index}]")
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}
    params = completion_params(request)
    choices = Choices(llm, request, [await _text(llm, prompt) for prompt in prompts if request.echo])
    returns_output = request.max_tokens > 0
    return Generation(llm, request, prompts, params, head, watch, choices.whole, choices.pieces, returns_output)


async def _text(llm: AsyncLLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await llm.in_tokenizer_thread(decode, llm.input_processor, prompt)


class Choices:
    """Makes choices of deltas, and counts the characters of their tokens."""

    def __init__(self, llm: AsyncLLM, request: CompletionRequest, prompts: Sequence[str]) -> None:
        """`prompts`: the texts to echo."""
        self.llm, self.request, self.prompts = llm, request, prompts
        self._offsets: defaultdict[int, int] = defaultdict(int)  # index of a choice -> `text_offset` of the next token

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the choices of a delta's chunks: none for tokens without text, unless they have log-probabilities."""
        if delta.is_first and self.request.echo:
            output = delta.output
            yield self._part(delta, self.prompts[delta.prompt], output.prompt_token_ids, output.prompt_logprobs)
        if delta.text or (delta.logprobs is not None and delta.token_ids):
            yield self._part(delta, delta.text, delta.token_ids, delta.logprobs)
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield {"index": delta.choice, "text": "", "logprobs": None, **end}

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of an answer: its parts joined."""
        *pieces, end = self.pieces(delta)
        logprobs = [part["logprobs"] for part in pieces if part["logprobs"] is not None]
        joined = {name: [value for one in logprobs for value in one[name]] for name in (logprobs or [{}])[0]}
        return {**end, "text": "".join(part["text"] for part in pieces), "logprobs": joined or None}

    def _part(
        self, delta: Delta, text: str, token_ids: Sequence[int], rows: Sequence[TokenLogprobs | None] | None
    ) -> dict[str, Any]:
        logprobs = None
        if rows is not None:
            tokenizer = self.llm.input_processor.tokenizer
            logprobs = completion_logprobs(token_ids, rows, self._offsets[delta.choice], tokenizer)
            self._offsets[delta.choice] += sum(map(len, logprobs["tokens"]))
        return {"index": delta.choice, "text": text, "logprobs": logprobs, "finish_reason": None}
