"""The waiting queue: whoever was preempted first, by arrival; then the others, by arrival."""

from random import Random

import pytest
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m1_single_request.request import RequestStatus
from m3_paged_attention.request import Request
from m3_paged_attention.request_queue import PreemptedFirstQueue
from tests.testbed.fakes import make_request


def request(number: int, *, preempted: bool = False) -> Request:
    made = make_request(f"r{number}", [1, 2, 3], SamplingParams(), request_class=Request)
    assert isinstance(made, Request)
    made.number = number
    if preempted:
        made.status = RequestStatus.PREEMPTED
    return made


def filled(*numbers: int) -> PreemptedFirstQueue:
    """Negative numbers were preempted."""
    queue = PreemptedFirstQueue()
    for number in numbers:
        queue.add_request(request(abs(number), preempted=number < 0))
    return queue


def numbers(queue: PreemptedFirstQueue) -> list[int]:
    return [one.number for one in queue]


def test_it_begins_empty() -> None:
    queue = PreemptedFirstQueue()
    assert not queue and len(queue) == 0 and list(queue) == []
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_who_came_first_leaves_first() -> None:
    queue = filled(1, 2, 3)
    assert [queue.pop_request().number for _ in range(3)] == [1, 2, 3]
    assert not queue


def test_a_look_at_the_next_takes_nothing_out() -> None:
    queue = filled(1, 2, -3)
    assert queue.peek_request() is queue.peek_request() and len(queue) == 3
    assert queue.peek_request() is queue.pop_request()


def test_whoever_was_preempted_goes_before_all_others() -> None:
    assert numbers(filled(1, 2, -3)) == [3, 1, 2]


@pytest.mark.parametrize("order", [(-4, -1, -2), (-2, -4, -1), (-1, -2, -4)])
def test_among_the_preempted_the_oldest_arrival_comes_first(order: tuple[int, ...]) -> None:
    assert numbers(filled(3, *order, 5)) == [1, 2, 4, 3, 5]


def test_requests_can_be_taken_out_anywhere() -> None:
    queue = filled(1, 2, 3, -4, -5)
    queue.remove_requests([one for one in queue if one.number in (2, 5)])
    assert numbers(queue) == [4, 1, 3]
    queue.remove_requests([])
    queue.remove_requests([request(1)])
    assert numbers(queue) == [4, 1, 3], "it is the request that is taken out and not one of the same id"


@given(st.lists(st.sampled_from(["add", "preempt", "pop", "remove"])), st.randoms(use_true_random=False))
def test_it_behaves_as_a_sorted_list_does(verbs: list[str], random: Random) -> None:
    queue, model, ran = PreemptedFirstQueue(), list[Request](), list[Request]()
    for number, verb in enumerate(verbs):
        if verb == "add":
            model.append(request(number))
            queue.add_request(model[-1])
        elif verb == "preempt" and ran:  # somebody who left before
            back = ran.pop(random.randrange(len(ran)))
            back.status = RequestStatus.PREEMPTED
            queue.add_request(back)
            model.append(back)
        elif verb == "pop" and model:
            ran.append(queue.peek_request())
            assert queue.pop_request() is ran[-1] is model.pop(0)
        elif verb == "remove" and model:
            gone = random.sample(model, k=len(model) // 2)
            model = [one for one in model if one not in gone]
            queue.remove_requests(gone)
        model.sort(key=lambda one: (one.status is not RequestStatus.PREEMPTED, one.number))
        assert list(queue) == model and len(queue) == len(model) and bool(queue) == bool(model)
