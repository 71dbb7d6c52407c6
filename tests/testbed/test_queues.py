"""The waiting queues: requests that were preempted come first where there are any; then all by arrival."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m1_single_request.request import RequestStatus
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m3_paged_attention.request import Request
from m3_paged_attention.request_queue import PreemptedFirstQueue
from tests.testbed.fakes import make_request

each_queue = pytest.mark.parametrize("kind", [FCFSRequestQueue, PreemptedFirstQueue], ids=["m2", "m3"])


def request(number: int) -> Any:
    made: Any = make_request(f"r{number}", [1, 2, 3], SamplingParams(), request_class=Request)
    made.number = number
    return made


@each_queue
def test_requests_are_removed_by_identity_and_not_by_id(kind: Any) -> None:
    queue, one = kind(), request(1)
    queue.add_request(one)
    queue.remove_requests([request(1), request(2)])
    assert list(queue) == [one]


@each_queue
@given(st.lists(st.sampled_from(["add", "preempt", "pop", "remove"])), st.randoms(use_true_random=False))
def test_it_behaves_as_a_sorted_list_does(kind: Any, verbs: list[str], random: Random) -> None:
    queue, model, ran = kind(), list[Any](), list[Any]()
    for number, verb in enumerate(verbs):
        if verb == "add":
            model.append(request(number))
            queue.add_request(model[-1])
        elif verb == "preempt" and ran and kind is PreemptedFirstQueue:  # one that left before
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
