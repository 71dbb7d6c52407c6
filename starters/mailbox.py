"""Build the mailbox of m7: where the outputs of a call wait for their reader, who may be slow.

One event loop reads for hundreds of clients, and the engine makes outputs for all of them in one batch. If a client
that reads slowly had a queue, the queue would be bounded, and all would wait for it, or unbounded, and it would fill
the memory. But an output has everything that its request has produced so far: a newer one is worth more than all
before it. So a place for one output of each request is enough. What must not happen: an end that is lost, a reader who
waits for an output that has come, and a stream that ends too early.

Explained in docs/m7_serving.md#mailbox-one-place-for-each-request.

    cp starters/mailbox.py my_mailbox.py
    pytest --part mailbox=my_mailbox.py:MyMailbox
"""

from m1_single_request.outputs import RequestOutput


class MyMailbox:
    """The newest outputs of the requests of one call. All methods are called in one event loop, and `take` by one
    reader, who calls it again and again until the result is empty.
    """

    unfinished: dict[str, int]
    """By id, the index of each request whose last output has not been put. If the reader goes away, these requests are
    aborted."""

    def __init__(self, request_ids: list[str]) -> None:
        """The requests of the call, with the indices 0, 1, ... All of them are `unfinished`. There may be none."""
        raise NotImplementedError

    def put(self, output: RequestOutput) -> None:
        """Keep an output of the request `output.request_id` for the reader, in place of an older one. It does not wait.

        If `output.finished`, it is the last one of this request: remove the request from `unfinished`.
        """
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End all requests with an error: the `take` that waits, or else the next one, raises it. Outputs that were not
        read are dropped, and no request is `unfinished` any more. No `put` comes after it, and no `take` after the
        error."""
        raise NotImplementedError

    async def take(self) -> dict[int, RequestOutput]:
        """Return the newest output of each request that has one since the last call, by the index of the request.

        Without a new output it waits for one, and the event loop runs meanwhile. It never returns an empty result while
        a request is unfinished. After the last output of every request was returned, it returns an empty result at
        once, every time. The caller keeps the result: a later `put` must not change it.
        """
        raise NotImplementedError
