"""What has come is not lost to a Ctrl-C: it stays in its queue until it is handled.

A signal's exception may come between any two lines of whoever handles a message, and the next step goes on as if
nothing had been. So the one message that was being handled then is handed out again, and whoever handles messages must
not mind one that comes twice. New in this milestone: until now everything that a step works on was made in that step.
"""

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def handed_out(queue: deque[T]) -> Iterator[T]:
    """What is in the queue, oldest first. Each leaves it when the next one is asked for, for then it is handled."""
    while queue:
        yield queue[0]
        queue.popleft()
