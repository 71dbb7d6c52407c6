"""Build the receiving end of a KV transfer of m6: the state of one request's KV on its way to the decode engine.

The prefill engine sends the KV of a prompt in chunks, and with the first token the number of chunks in all. Messages
may come late, twice, or not at all; the request may be aborted and the other engine lost at any time. A wrong state is
silent: the request starts with a hole in its KV and answers fluently, or waits for a message that cannot come. So every
message is checked before it counts, and an impossible one is an error at once.

Explained in docs/m6_kv_transfer.md#2-kvsender-and-kvreceiver-the-two-ends-of-a-transfer.

    cp starters/transfer_state.py my_receiver.py
    pytest --part transfer_state=my_receiver.py:MyKVReceiver
"""

from m6_multimodal_pd.disaggregation.poll import KVPoll, OnChange


class MyKVReceiver:
    """The end of the decode side. Its engine, and the events of the trace, read the fields that `__init__` sets.

    A transition sets `state`, and then calls `on_change(before, after, why)` with both states and a text, not empty,
    that names the cause. The transitions that exist (they are in `TRANSITIONS` of the same module as `KVPoll`):

        BOOTSTRAPPING -> WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS
        WAITING_FOR_INPUT -> SUCCESS, if all pages are cached
        BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING -> FAILED

    FAILED and SUCCESS are final (`state.is_final`): then no method changes anything or raises an error, and each of
    those that return a bool returns False. A call that returns False or raises `TransferError` has changed nothing;
    this error is in `m6_multimodal_pd.errors`.
    """

    def __init__(self, room: int, *, num_tokens: int, page_size: int, on_change: OnChange) -> None:
        """Given. `num_tokens`: of the prompt; they are in `end_page` pages, of which the last need not be full."""
        self.room, self.num_tokens, self.page_size = room, num_tokens, page_size
        self.on_change = on_change
        self.state = KVPoll.BOOTSTRAPPING
        self.start = 0
        """Number of tokens whose KV this engine has cached, in whole pages: they do not come."""
        self.num_chunks = 0
        """Number of chunks that have come. Chunks are numbered from 0, so it is the number of the next one."""
        self.next_page = 0
        """The next page that has to come: pages are counted from 0 in the prompt, and come in their order."""
        self.announced: int | None = None
        """Number of chunks in all; None until the first token has come."""

    @property
    def end_page(self) -> int:
        """Given: index after the last page of the prompt."""
        return -(-self.num_tokens // self.page_size)

    def fail(self, why: str) -> bool:
        """Move to FAILED with the cause `why`, and return True. Returns False if the state is final."""
        raise NotImplementedError

    def preallocated(self, start: int) -> bool:
        """Note that there is memory for the prompt, of which the first `start` tokens are cached: set `start` and
        `next_page`, move from BOOTSTRAPPING to WAITING_FOR_INPUT, and return True.

        Returns False in any other state. Raises `TransferError` for a `start` that is not a multiple of the page size
        from 0 to `num_tokens`.
        """
        raise NotImplementedError

    def expects(self, number: int, pages: range) -> bool:
        """Return whether this chunk, with these pages, is the next one. Changes nothing.

        Returns False if the state is final, and for a chunk that came before: its number is less than `num_chunks`.
        Raises `TransferError` for an impossible chunk:

        - in BOOTSTRAPPING;
        - another number, or another first page, than the next; pages after the last one; or no pages at all;
        - one after which the announced chunks could not bring the missing pages (see `first_token_arrived`).
        """
        raise NotImplementedError

    def arrived(self, pages: range) -> None:
        """Count the chunk that `expects` has just returned True for. The first one moves to TRANSFERRING."""
        raise NotImplementedError

    def first_token_arrived(self, num_chunks: int) -> bool:
        """Set `announced` to this number of chunks, which came with the first token, and return True. The state does
        not change. The first token may come before some chunks, or before all of them.

        Returns False if the state is final, and if a number is announced already. Raises `TransferError` in
        BOOTSTRAPPING, and for an impossible number: the chunks that are still to come must be able to bring the pages
        that are still missing, each of them one page or more. So without missing pages no chunk is to come; with
        missing pages, one chunk at least, and at most as many as pages.
        """
        raise NotImplementedError

    def complete(self) -> bool:
        """Move to SUCCESS, and return True, if the first token and all announced chunks have come.

        Returns False if something is missing, and if the state is final: it returns True once.
        """
        raise NotImplementedError
