"""A proposer that fails, or returns invalid drafts: requests end with its name, the others go on, and nothing leaks.

If it raises, or returns another number of rows, all requests that use speculation end. An invalid row ends its own
request only.

Wrong guesses are no lie, they only cost time. More guesses than were asked for would have no memory, guesses for
somebody else's row would be verified there, and an id outside the vocabulary is nothing that the model could read.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from m1_single_request.outputs import RequestOutput
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec import LLMEngine, PartError
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN
from tests.m5_chunked_prefill_spec.engines import (
    VOCAB_SIZE,
    MakeEngine,
    Remembered,
    check_flushed,
    greedy,
    run,
    setting,
)

PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "plain": [51, 52, 53, 54]}
NUM_TOKENS = 12

Says = Callable[[Sequence[Req], Sequence[int]], Any]


def honest(limits: Sequence[int]) -> list[list[int]]:
    """Guesses that are wrong, but in order."""
    return [[7] * limit for limit in limits]


WITHOUT_ROWS: dict[str, Says] = {
    "raises": lambda reqs, limits: {}["guess"],
    "nothing": lambda reqs, limits: None,
    "one row too few": lambda reqs, limits: honest(limits)[1:],
    "fails on the way": lambda reqs, limits: (honest(limits)[i] if i == 0 else {}[i] for i in range(len(reqs))),
}
ROWS: dict[str, Says] = {
    "one more than it may": lambda reqs, limits: [[*own, 7] for own in honest(limits)],
    "without end": lambda reqs, limits: [repeat(7) for _ in reqs],
    "ids beyond the vocabulary": lambda reqs, limits: [[VOCAB_SIZE] * limit for limit in limits],
    "unknown ids where nobody makes them": lambda reqs, limits: [[UNKNOWN] * limit for limit in limits],
    "ids of thousands of digits": lambda reqs, limits: [[10**5000] * limit for limit in limits],
    "texts": lambda reqs, limits: ["7" * limit for limit in limits],
    "rows of nothing": lambda reqs, limits: [None for _ in reqs],
    "rows that fail on the way": lambda reqs, limits: [map({}.__getitem__, own) for own in honest(limits)],
}

METHODS = ("ngram", "draft_model")
TRUE = {("draft_model", "unknown ids where nobody makes them")}  # there the draft model makes them


def proposer_that(says: Says, *, after: int = 0) -> type:
    """A proposer that says this from some step on."""

    class Liar:
        def __init__(self, config: Any) -> None:
            self.count = 0

        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> Any:
            self.count += 1
            return says(reqs, limits) if self.count > after else honest(limits)

    return Liar


def submit(engine: LLMEngine) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=rid, speculate=rid != "plain")


def check_plain(outputs: dict[str, RequestOutput], m1: Remembered, rids: Sequence[str]) -> None:
    """These have m1's answers."""
    for rid in rids:
        assert outputs[rid].error is None
        assert outputs[rid].token_ids == m1.generate(PROMPTS[rid], greedy(NUM_TOKENS)).token_ids, rid


def check_failed(output: RequestOutput, m1: Remembered, rid: str) -> None:
    """It ended with the proposer's error, behind the right tokens."""
    assert output.finish_reason == "error" and isinstance(output.error, PartError)
    assert "the part 'proposer' (Liar)" in str(output.error) and len(str(output.error)) < 300
    assert output.token_ids == m1.generate(PROMPTS[rid], greedy(NUM_TOKENS)).token_ids[: len(output.token_ids)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lie", WITHOUT_ROWS)
def test_a_proposer_that_returns_no_rows_ends_all_requests(
    make_engine: MakeEngine, m1: Remembered, lie: str, after: int, method: str
) -> None:
    engine = make_engine({"proposer": proposer_that(WITHOUT_ROWS[lie], after=after)}, **setting(method=method))
    submit(engine)
    outputs = run(engine)
    for rid in PROMPTS:
        check_failed(outputs[rid], m1, rid)
        assert len(outputs[rid].token_ids) > after
    assert engine.generate(PROMPTS["plain"], greedy(3), speculate=False).finish_reason == "length"
    check_flushed(engine)


@pytest.mark.parametrize(("method", "lie"), [(m, lie) for m in METHODS for lie in ROWS if (m, lie) not in TRUE])
def test_an_invalid_draft_ends_its_request_only(make_engine: MakeEngine, m1: Remembered, lie: str, method: str) -> None:
    def says(reqs: Sequence[Req], limits: Sequence[int]) -> Any:
        lies = ROWS[lie](reqs, limits)
        return [
            lies[i] if req.rid == "a" else own for i, (req, own) in enumerate(zip(reqs, honest(limits), strict=True))
        ]

    engine = make_engine({"proposer": proposer_that(says, after=1)}, **setting(method=method))
    submit(engine)
    outputs = run(engine)
    check_plain(outputs, m1, ["b", "plain"])
    check_failed(outputs["a"], m1, "a")
    assert engine.stats().num_finished == {"length": 2, "error": 1}
    check_flushed(engine)


def test_several_invalid_drafts_of_a_step_end_each_its_own_request(make_engine: MakeEngine, m1: Remembered) -> None:
    bad = {"a": [VOCAB_SIZE], "b": [7] * 9}
    engine = make_engine(
        {"proposer": proposer_that(lambda reqs, limits: [bad.get(req.rid, [7]) for req in reqs])},
        **setting(method="ngram"),
    )
    submit(engine)
    engine.add_request([61, 62, 63], greedy(NUM_TOKENS), request_id="c")
    outputs = run(engine)
    check_plain(outputs, m1, ["plain"])
    assert outputs["c"].token_ids == m1.generate([61, 62, 63], greedy(NUM_TOKENS)).token_ids
    assert f"drafted {VOCAB_SIZE} for 'a'" in str(outputs["a"].error)
    assert "may return 4 drafts for request 'b'; it returned more" in str(outputs["b"].error)


def taken_apart(reqs: Any, limits: Any) -> Any:
    """What is honest; the lists that were given are not what they were."""
    found = honest(limits)
    reqs.clear()
    limits[:] = [1000]
    return found


FINE: dict[str, Says] = {
    "as many, and takes its lists apart": taken_apart,
    "something for who asked for none": lambda reqs, limits: [own or [7] for own in honest(limits)],
    "fewer": lambda reqs, limits: [own[:1] for own in honest(limits)],
    "none": lambda reqs, limits: [[] for _ in reqs],
    "numbers of numpy": lambda reqs, limits: [np.full(limit, 7) for limit in limits],
    "one after the other": lambda reqs, limits: (iter([7] * limit) for limit in limits),
    "the largest id": lambda reqs, limits: [[VOCAB_SIZE - 1, 0][:limit] for limit in limits],
}


@pytest.mark.parametrize("says", FINE)
@pytest.mark.parametrize("method", METHODS)
def test_any_guess_in_order_is_taken(make_engine: MakeEngine, m1: Remembered, says: str, method: str) -> None:
    engine = make_engine({"proposer": proposer_that(FINE[says])}, **setting(method=method))
    submit(engine)
    check_plain(run(engine), m1, list(PROMPTS))
    assert (engine.stats().num_draft_tokens == 0) == (says == "none")
    check_flushed(engine)


def test_a_proposer_that_lies_once_is_asked_again_for_later_ones(make_engine: MakeEngine, m1: Remembered) -> None:
    count = 0

    def says(reqs: Sequence[Req], limits: Sequence[int]) -> Any:
        nonlocal count
        count += 1
        return None if count == 2 else honest(limits)

    engine = make_engine({"proposer": proposer_that(says)}, **setting(method="ngram"))
    submit(engine)
    assert {type(output.error) for output in run(engine).values()} == {PartError}
    submit(engine)
    check_plain(run(engine), m1, list(PROMPTS))
    assert count > 3
