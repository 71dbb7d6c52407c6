"""The encoder budget bounds the pieces of a step: where it cuts, and what it is asked.

Here it is a number of tokens that counts down, so that every case can be seen at a glance.
"""

from typing import Any

import pytest

from m1_single_request.tracer import Tracer
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m6_multimodal_pd.prefill_adder import PrefillAdder
from tests.m4_radix_cache.caches import make_cache
from tests.m4_radix_cache.reqs import fill, make_req
from tests.m4_radix_cache.test_prefill_adder import add
from tests.m5_chunked_prefill_spec.test_prefill_adder import begun, make_adder
from tests.support.engines import Recorder

CONTINUE, OTHER = AddReqResult.CONTINUE, AddReqResult.OTHER


class Allowance:
    """In place of an `EncoderBudget`: so many tokens for all pieces of a step together."""

    name = "encoder_budget"

    def __init__(self, left: int) -> None:
        self.left = left
        self.asked: set[tuple[str, int]] = set()
        self.taken: list[tuple[str, int, int]] = []

    def most(self, req: Req, start: int, num_tokens: int) -> int:
        self.asked.add((req.rid, start))
        return min(num_tokens, self.left)

    def take(self, req: Req, start: int, num_tokens: int) -> None:
        self.left -= num_tokens
        self.taken.append((req.rid, start, num_tokens))


def allowing(left: int) -> Any:
    """m6's adder with such a budget."""

    def make(**limits: Any) -> PrefillAdder:
        budget: Any = Allowance(left)
        return PrefillAdder(**limits).limit_encoding(budget)

    return make


def recorded(left: int, cache: Any = None, **limits: Any) -> tuple[Any, Recorder]:
    """Such an adder, and its events."""
    tracer = Tracer()
    recorder = Recorder(tracer)
    return make_adder(cache or make_cache(num_pages=500), adder_class=allowing(left), tracer=tracer, **limits), recorder


def prompt(number: int, length: int) -> Req:
    return make_req(number, [7 + number] * length, max_tokens=5)


@pytest.mark.parametrize(
    ("left", "given", "bound_by"), [(20, 20, "encoder_budget"), (32, 32, "max_num_batched_tokens")]
)
def test_a_prompt_is_cut_by_the_tighter_of_two_limits(left: int, given: int, bound_by: str) -> None:
    adder, recorder = recorded(left, tokens=32)
    req = prompt(1, 100)
    assert add(adder, req) is OTHER and adder.new_chunked_req is req
    assert (req.extend_input_len, adder.rem_input_tokens) == (given, 32 - given)
    assert [event.bound_by for event in recorder.events("chunk_cut")] == [bound_by]


def test_it_is_asked_and_told_of_what_stands_behind_the_hit() -> None:
    cache = make_cache(num_pages=500)
    fill(cache, [8] * 12)
    adder, _ = recorded(30, cache, tokens=100)
    add(adder, prompt(1, 20))
    assert adder.add_chunked_req(begun(cache, 2, 60, 15, max_tokens=5)) is OTHER
    limit = adder.encoder_budget
    assert limit.asked == {("r1", 12), ("r2", 15)} and limit.taken == [("r1", 12, 8), ("r2", 15, 22)]


@pytest.mark.parametrize(("left", "given"), [(40, 32), (32, 32), (17, 16), (16, 16), (15, 15), (1, 1)])
def test_a_piece_ends_at_a_page_unless_the_other_limit_has_no_page(left: int, given: int) -> None:
    adder = make_adder(make_cache(page_size=16, num_pages=50), align=16, adder_class=allowing(left))
    req = prompt(1, 100)
    assert add(adder, req) is OTHER and req.extend_input_len == given
