"""Token counts of an answer, as OpenAI sends them. New in this milestone. vLLM: `UsageInfo`."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from m1_single_request.outputs import RequestOutput

Watch = Callable[[int], AbstractContextManager[Callable[[int, RequestOutput], None]]]
"""The metrics of one call. Called with the number of prompts; the value of the context takes each output, with the
index of its prompt."""


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the sums over the prompts of a request: a prompt counts once for all of its `n` outputs."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(each.token_ids) for each in output.outputs)
        cached += output.metrics.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
