"""Requests with several outputs (`n > 1`), and the single requests of m1 whose answers they must give."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from m1_single_request import RequestOutput, SamplingParams


def drawn(max_tokens: int = 6, n: int = 4, **params: Any) -> SamplingParams:
    """Parameters that draw, from seed 11 on; an output ends at its length unless `params` say otherwise."""
    defaults = {"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    return SamplingParams(**defaults | params)


class Singles:
    """`singles(prompt, params)`: m1's answers to the children of a request, each asked for by itself."""

    def __init__(self, m1: Any) -> None:
        self.m1 = m1

    def __call__(self, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        assert params.seed is not None
        children = [replace(params, n=1, seed=params.seed + child) for child in range(params.n)]
        return [self.m1.generate(prompt, child) for child in children]


def check_children(output: RequestOutput, expected: Sequence[RequestOutput]) -> None:
    """The completions are those of the requests asked alone, in the order of their seeds."""
    assert output.finished and [completion.index for completion in output.outputs] == list(range(len(expected)))
    for completion, wanted in zip(output.outputs, expected, strict=True):
        (single,) = wanted.outputs
        assert (completion.text, completion.token_ids) == (single.text, single.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == (single.finish_reason, single.stop_reason)
        if single.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            assert completion.cumulative_logprob == pytest.approx(single.cumulative_logprob, abs=1e-3)
            assert [row.keys() for row in completion.logprobs] == [row.keys() for row in single.logprobs]
