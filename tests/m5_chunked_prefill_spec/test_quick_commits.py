"""The quick ways of doing things do what the careful ones do: runs of tokens appended at once, n-grams looked up."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import FinishLength, Sequence
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.request_updater import RequestUpdater
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec import DEFAULT_MODEL, SamplingParams
from m5_chunked_prefill_spec.result_processor import commit_run_simply
from m5_chunked_prefill_spec.speculative.proposer import NgramProposer

EOS, STOP = 0, 9


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def begun(tokenizer: Any, **settings: Any) -> tuple[RequestUpdater, Req]:
    """A request with a prompt of three tokens that has got one."""
    updater = RequestUpdater(
        stop_checker=StopChecker(eos_token_ids=frozenset({EOS}), max_model_len=40), tracer=Tracer()
    )
    sequence = Sequence("a", [5, 6, 7], SamplingParams(**settings), IncrementalDetokenizer(tokenizer))
    request = Req("a", None, sequence, seed=0, arrival_time=0.0)
    updater.commit(request, SampledTokens((8,), (None,), None), num_new_kv=3)
    return updater, request


def state(request: Req) -> tuple[Any, ...]:
    sequence = request.sequence
    return sequence.output_token_ids, sequence.num_computed_tokens, request.to_finish


@pytest.mark.parametrize("run", [[11], [11, 12], [11, 12, 13, 14, 15]])
def test_a_run_that_ends_nothing_is_appended_at_once_as_it_would_be_one_by_one(tokenizer: Any, run: list[int]) -> None:
    updater, quick = begun(tokenizer, max_tokens=20)
    assert commit_run_simply(updater, quick, run)
    updater, careful = begun(tokenizer, max_tokens=20)
    updater.commit(careful, SampledTokens(tuple(run), (None,) * len(run), None), num_new_kv=1)
    assert state(quick) == state(careful) == ([8, *run], 3 + len(run), None)


@pytest.mark.parametrize(
    ("settings", "run"),
    [
        ({"max_tokens": 20}, [11, EOS, 12]),
        ({"max_tokens": 20, "stop_token_ids": [STOP]}, [11, 12, STOP]),
        ({"max_tokens": 4}, [11, 12, 13]),
        ({"max_tokens": 4}, [11, 12, 13, 14, 15]),
        ({"max_tokens": 20, "stop": ["x"]}, [11, 12]),
        ({"max_tokens": 20, "logprobs": 2}, [11, 12]),
        ({"max_tokens": 20, "min_tokens": 6}, [11, 12]),
    ],
)
def test_a_run_in_which_the_request_may_end_is_left_to_the_stop_checker(
    tokenizer: Any, settings: dict[str, Any], run: list[int]
) -> None:
    updater, request = begun(tokenizer, **settings)
    before = ([8], 3, None)
    assert not commit_run_simply(updater, request, run)
    assert state(request) == before


def test_a_run_for_a_request_that_is_about_to_end_is_not_appended(tokenizer: Any) -> None:
    updater, request = begun(tokenizer, max_tokens=20)
    request.to_finish = FinishLength("max_tokens", 20)
    assert not commit_run_simply(updater, request, [11])
    assert request.sequence.output_token_ids == [8]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 9, 3, 4], [9, 3]),  # two last tokens stood there
        ([3, 4, 8, 8, 2, 3, 4, 9, 2, 3, 4], [9, 2]),  # three are better than two that stood there earlier
        ([2, 3, 4, 9, 2, 3, 4, 7, 2, 3, 4], [9, 2]),  # of several places the earliest
        ([1, 2, 3, 4, 5], []),
        ([4, 4, 4], [4]),  # the copy may reach into the last tokens themselves
        ([256, 0, 0, 9, 1, 0], []),  # bytes of two tokens are no token
    ],
)
def test_the_longest_run_that_stood_there_before_decides_at_its_earliest_place(
    tokens: list[int], found: list[int]
) -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=4)
    assert proposer.lookup(RadixKey(tokens), 2) == found
