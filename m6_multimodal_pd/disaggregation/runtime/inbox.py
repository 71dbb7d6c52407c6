"""A queue of messages from which each is removed once it is handled.

If handling a message raises, the message is handed out again by the next call. So a handler must accept a message that
comes twice. New in this milestone: until now everything that a step works on was made in that step.
"""

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def handed_out(queue: deque[T]) -> Iterator[T]:
    """Yield the messages of the queue, oldest first; remove each when the next one is asked for."""
    while queue:
        yield queue[0]
        queue.popleft()
