"""One request's KV on its way from a prefill engine to a decode engine, as a state machine with two ends.

    Bootstrapping ──preallocated──▶ WaitingForInput ──first chunk──▶ Transferring ──all is there──▶ Success
          └────────────────────────────────┴─────────────────────────────┴────────────────────────▶ Failed

Each end has a state of its own, and learns of the other one's by messages, which may come late, twice, or not at all.
So the rules are here, apart from sockets and memory: *Failed* and *Success* are final; a chunk counts once and in its
turn; a transfer is complete when the first token, the announced number of chunks and all their pages are there, and not
before. A room, the number under which both engines know the transfer, is never used again: a retry has another one. New
in this milestone. SGLang: `KVPoll`, `BaseKVSender`, `BaseKVReceiver` in `disaggregation/base/conn.py`.
"""

from collections.abc import Callable
from enum import IntEnum

from m6_multimodal_pd.errors import TransferError


class KVPoll(IntEnum):
    """State of a transfer."""

    FAILED = 0
    BOOTSTRAPPING = 1
    """The decode side has not reported memory yet."""
    WAITING_FOR_INPUT = 2
    """The decode side has memory for the prompt's KV, and none of it has come."""
    TRANSFERRING = 3
    SUCCESS = 4

    @property
    def is_final(self) -> bool:
        """Whether no message changes it any more."""
        return self in (KVPoll.FAILED, KVPoll.SUCCESS)


TRANSITIONS: dict[KVPoll, tuple[KVPoll, ...]] = {
    KVPoll.BOOTSTRAPPING: (KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED),
    KVPoll.WAITING_FOR_INPUT: (KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED),
    KVPoll.TRANSFERRING: (KVPoll.SUCCESS, KVPoll.FAILED),
    KVPoll.SUCCESS: (),
    KVPoll.FAILED: (),
}
"""The next states of each state. (With all of a prompt cached on the decode side nothing is transferred.)"""

OnChange = Callable[[KVPoll, KVPoll, str], None]
"""Called for every transition with the state before, the state after, and the cause."""


class Transfer:
    """The common part of both ends."""

    def __init__(self, room: int, *, num_tokens: int, page_size: int, on_change: OnChange) -> None:
        """`num_tokens`: of the prompt, and in a retry of the output so far, whose KV is transferred."""
        self.room, self.num_tokens, self.page_size = room, num_tokens, page_size
        self.state = KVPoll.BOOTSTRAPPING
        self.start = 0
        """Number of tokens that are cached on the decode side, in whole pages."""
        self.num_chunks = 0
        """Number of chunks sent, or received."""
        self.next_page = 0
        """Index in the prompt of the next page to be sent, or received."""
        self._on_change = on_change

    @property
    def end_page(self) -> int:
        """Index after the last page of the prompt."""
        return -(-self.num_tokens // self.page_size)

    def fail(self, why: str) -> bool:
        """Fail the transfer. Returns False, and changes nothing, if its state is final."""
        return self._go(KVPoll.FAILED, why)

    def _go(self, state: KVPoll, why: str) -> bool:
        if state not in TRANSITIONS[self.state]:
            return False
        before, self.state = self.state, state
        self._on_change(before, state, why)
        return True

    def _begin(self, start: int, why: str) -> bool:
        if start % self.page_size or not 0 <= start <= self.num_tokens:
            raise TransferError(f"room {self.room}: {start} tokens of {self.num_tokens} are no whole pages of it")
        if self.state is not KVPoll.BOOTSTRAPPING:
            return False
        self.start, self.next_page = start, start // self.page_size
        return self._go(KVPoll.WAITING_FOR_INPUT, why)


class KVSender(Transfer):
    """The end of the prefill side."""

    has_sent_first_token = False
    """Whether the first token was sent, after the last chunk."""

    def preallocated(self, start: int) -> bool:
        """Note that the decode side has memory, and the KV of the first `start` tokens. Returns False for a message
        that comes late or twice. Raises `TransferError` for an impossible start."""
        return self._begin(start, f"the decode side has room{f', and {start} tokens already' if start else ''}")

    def pages_ready(self, num_computed: int, *, at_most: int) -> range:
        """Return the next pages to send when `num_computed` tokens have their KV: whole pages, and with the last token
        the page that is not full."""
        whole = self.end_page if num_computed >= self.num_tokens else num_computed // self.page_size
        return range(self.next_page, max(self.next_page, min(whole, self.next_page + at_most)))

    def sent(self, pages: range) -> int:
        """Note that these pages were sent. Returns the number of their chunk."""
        assert not self.state.is_final and len(pages) and pages.start == self.next_page, "pages go in their order, once"
        if self.state is KVPoll.WAITING_FOR_INPUT:
            self._go(KVPoll.TRANSFERRING, "the first pages are sent")
        self.num_chunks, self.next_page = self.num_chunks + 1, pages.stop
        return self.num_chunks - 1

    def received(self) -> bool:
        """Note that the decode side has everything. Returns False for a message that comes late or too early."""
        return self.has_sent_first_token and self._go(KVPoll.SUCCESS, "the decode side has everything")


class KVReceiver(Transfer):
    """The end of the decode side."""

    announced: int | None = None
    """Number of chunks in all; known with the first token."""

    def preallocated(self, start: int) -> bool:
        """Note that there is memory for the rest of the prompt. Returns False the second time."""
        return self._begin(start, f"room is taken; {start} tokens are cached" if start else "room is taken")

    def expects(self, number: int, pages: range) -> bool:
        """Return whether this chunk is the next one; False for one that came before, or comes too late.

        Raises `TransferError` for an impossible one: out of turn, or with pages of other chunks.
        """
        if self.state.is_final or number < self.num_chunks:
            return False
        is_next = number == self.num_chunks and pages.start == self.next_page and len(pages) > 0
        is_next = is_next and pages.stop <= self.end_page and self._can_follow(self.announced, number + 1, pages.stop)
        if self.state is KVPoll.BOOTSTRAPPING or not is_next:
            raise TransferError(
                f"room {self.room}: chunk {number} brings the pages {pages.start} to {pages.stop}; expected was chunk "
                f"{self.num_chunks} from page {self.next_page} on, of {self.end_page}"
            )
        return True

    def arrived(self, pages: range) -> None:
        """Note that the expected chunk has come. Do not `complete` the transfer while its pages are being copied."""
        if self.state is KVPoll.WAITING_FOR_INPUT:
            self._go(KVPoll.TRANSFERRING, "the first pages have come")
        self.num_chunks, self.next_page = self.num_chunks + 1, pages.stop

    def first_token_arrived(self, num_chunks: int) -> bool:
        """Note the number of chunks, which comes with the first token. Returns False for a message that is late or
        comes twice. Raises `TransferError` for an impossible number.
        """
        if self.state.is_final or self.announced is not None:
            return False
        if self.state is KVPoll.BOOTSTRAPPING or not self._can_follow(num_chunks, self.num_chunks, self.next_page):
            raise TransferError(
                f"room {self.room}: {num_chunks} chunks are announced, {self.num_chunks} came, and of {self.end_page} "
                f"pages those from {self.next_page} on are missing"
            )
        self.announced = num_chunks
        return True

    def complete(self) -> bool:
        """Complete the transfer if everything is there. Returns whether this call has completed it."""
        if self.num_chunks != self.announced:
            return False
        assert self.next_page == self.end_page, "chunks that leave pages out were refused"
        return self._go(KVPoll.SUCCESS, "everything is here")

    def _can_follow(self, announced: int | None, num_chunks: int, next_page: int) -> bool:
        """Return whether the chunks after the first `num_chunks` can bring the pages from `next_page` on, at least one
        each. If not, no message could complete the transfer."""
        missing = self.end_page - next_page
        return announced is None or min(missing, 1) <= announced - num_chunks <= missing
