"""Messages on their way to their handler."""

from collections import deque

from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out


def test_a_message_stays_in_its_queue_until_it_is_handled() -> None:
    queue = deque("abc")
    for letter in handed_out(queue):
        assert queue[0] == letter
        if letter == "b":
            break  # as if its handler raised
    assert list(handed_out(queue)) == ["b", "c"] and not queue
