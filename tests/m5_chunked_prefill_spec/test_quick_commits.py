"""A run of tokens that ends nothing is appended at once, with the same result as one by one."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import FinishLength, Sequence
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.request_updater import RequestUpdater
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec import DEFAULT_MODEL, SamplingParams
from m5_chunked_prefill_spec.result_processor import commit_run_simply

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
        ({}, [11, EOS, 12]),
        ({"stop_token_ids": [STOP]}, [11, 12, STOP]),
        ({"max_tokens": 4}, [11, 12, 13]),
        ({"max_tokens": 4}, [11, 12, 13, 14, 15]),
        *(({name: value}, [11, 12]) for name, value in (("stop", ["x"]), ("logprobs", 2), ("min_tokens", 6))),
    ],
)
def test_a_run_that_may_end_is_left_to_the_checker(tokenizer: Any, settings: dict[str, Any], run: list[int]) -> None:
    updater, request = begun(tokenizer, **{"max_tokens": 20} | settings)
    before = ([8], 3, None)
    assert not commit_run_simply(updater, request, run)
    assert state(request) == before


def test_a_run_for_a_request_that_is_about_to_end_is_not_appended(tokenizer: Any) -> None:
    updater, request = begun(tokenizer, max_tokens=20)
    request.to_finish = FinishLength("max_tokens", 20)
    assert not commit_run_simply(updater, request, [11])
    assert request.sequence.output_token_ids == [8]
