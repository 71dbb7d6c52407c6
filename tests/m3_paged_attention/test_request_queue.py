"""The waiting queue: preempted requests first, by arrival; then the others, by arrival."""

from random import Random

from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m1_single_request.request import RequestStatus
from m3_paged_attention.request import Request
from m3_paged_attention.request_queue import PreemptedFirstQueue
from tests.testbed.fakes import make_request


def request(number: int) -> Request:
    made = make_request(f"r{number}", [1, 2, 3], SamplingParams(), request_class=Request)
    assert isinstance(made, Request)
    made.number = number
    return made


def test_another_request_of_the_same_id_is_not_taken_out() -> None:
    queue, one = PreemptedFirstQueue(), request(1)
    queue.add_request(one)
    queue.remove_requests([request(1)])
    assert list(queue) == [one]


@given(st.lists(st.sampled_from(["add", "preempt", "pop", "remove"])), st.randoms(use_true_random=False))
def test_it_behaves_as_a_sorted_list_does(verbs: list[str], random: Random) -> None:
    queue, model, ran = PreemptedFirstQueue(), list[Request](), list[Request]()
    for number, verb in enumerate(verbs):
        if verb == "add":
            model.append(request(number))
            queue.add_request(model[-1])
        elif verb == "preempt" and ran:  # one that left before
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
