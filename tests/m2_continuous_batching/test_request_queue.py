"""The waiting queue: first come, first served, whatever happens at its ends and in its middle."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m1_single_request.request import Request
from m2_continuous_batching.request_queue import FCFSRequestQueue
from tests.testbed.fakes import make_request


def request(name: str) -> Request:
    return make_request(name, [1, 2, 3], SamplingParams())


def test_requests_are_removed_by_identity_and_not_by_id() -> None:
    queue = FCFSRequestQueue[Request]()
    queue.add_request(request("a"))
    queue.remove_requests([request("a"), request("stranger")])
    assert [one.request_id for one in queue] == ["a"]


def test_an_empty_queue_has_no_next() -> None:
    queue = FCFSRequestQueue[Request]()
    for call in (queue.pop_request, queue.peek_request):
        with pytest.raises(IndexError):
            call()


@given(st.lists(st.sampled_from(["add", "pop", "remove"])), st.randoms(use_true_random=False))
def test_it_behaves_as_a_list_does(verbs: list[str], random: Random) -> None:
    queue, model = FCFSRequestQueue[Request](), deque[Request]()
    for number, verb in enumerate(verbs):
        if verb == "add":
            model.append(request(f"r{number}"))
            queue.add_request(model[-1])
        elif verb == "pop" and model:
            assert queue.peek_request() is model[0]
            assert queue.pop_request() is model.popleft()
        elif verb == "remove" and model:
            chosen = random.sample(list(model), k=len(model) // 2)
            model = deque(one for one in model if one not in chosen)
            queue.remove_requests(chosen)
        assert list(queue) == list(model) and len(queue) == len(model) and bool(queue) == bool(model)
