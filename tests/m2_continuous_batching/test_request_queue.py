"""The waiting queue: who came first leaves first, whatever happens at its ends and in its middle."""

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


def names(queue: FCFSRequestQueue[Request]) -> list[str]:
    return [one.request_id for one in queue]


def filled(*ids: str) -> FCFSRequestQueue[Request]:
    queue = FCFSRequestQueue[Request]()
    for name in ids:
        queue.add_request(request(name))
    return queue


def test_two_queues_share_nothing() -> None:
    queue, other = filled("a"), FCFSRequestQueue[Request]()
    assert len(queue) == 1 and not other


def test_who_came_first_leaves_first() -> None:
    queue = filled("a", "b", "c")
    assert [queue.pop_request().request_id for _ in range(3)] == ["a", "b", "c"]
    assert not queue


def test_a_look_at_the_next_takes_nothing_out() -> None:
    queue = filled("a", "b")
    assert queue.peek_request() is queue.peek_request()
    assert names(queue) == ["a", "b"] and len(queue) == 2
    assert queue.peek_request() is queue.pop_request()


def test_requests_can_be_taken_out_of_the_middle() -> None:
    queue = filled("a", "b", "c", "d")
    queue.remove_requests([one for one in queue if one.request_id in "bd"])
    assert names(queue) == ["a", "c"]
    queue.remove_requests([])
    assert names(queue) == ["a", "c"]


def test_it_is_the_request_that_is_taken_out_and_not_one_of_the_same_id() -> None:
    queue = filled("a", "b")
    queue.remove_requests([request("a"), queue.pop_request()])
    assert names(queue) == ["b"], "who is not here is no error"
    queue.add_request(request("a"))
    queue.remove_requests([request("a")])
    assert names(queue) == ["b", "a"]


def test_an_empty_queue_has_no_next() -> None:
    queue = FCFSRequestQueue[Request]()
    with pytest.raises(IndexError):
        queue.pop_request()
    with pytest.raises(IndexError):
        queue.peek_request()


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
