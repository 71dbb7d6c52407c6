"""The side that computes prompts: chunks leave while later pieces of the prompt are still being computed.

After every step it looks how far each prompt is, and sends the pages that are complete; the last one goes with the end
of the prompt, full or not. Then the first token follows, with the number of chunks, so that the other side knows when
it has everything. If there is no room on the way, the pages wait for their turn; they stay in their places until all is
there. SGLang: `SchedulerDisaggregationPrefillMixin.send_kv_chunk`.
"""

import time
from typing import Any

from m1_single_request.request import RequestStatus
from m6_multimodal_pd.disaggregation.engine_side import EngineSide, Occupied
from m6_multimodal_pd.disaggregation.events import ChunkSent
from m6_multimodal_pd.disaggregation.first_token import TAKEN_OVER
from m6_multimodal_pd.disaggregation.poll import KVPoll, KVSender
from m6_multimodal_pd.disaggregation.runtime.jobs import row_of
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    FirstToken,
    Memory,
    MemoryRefused,
    PeerMessage,
    Preallocated,
    Prefill,
    Received,
    Row,
    Taken,
)
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.errors import TransferError, WireError

SHARE_OF_FRAMES = 4
"""A chunk takes at most this part of the room on the way, so that others get through beside it."""


class PrefillSide(EngineSide[KVSender]):
    """The side of an engine with a `PrefillScheduler`."""

    role = "prefill"

    def __init__(self, *, source: StagedSource, **settings: Any) -> None:
        """`settings`: as of every `EngineSide`."""
        super().__init__(**settings)
        self.source = source
        self.mapped: dict[str, bool] = {}
        """By decode engine: whether it has mapped the memory between the two."""
        self.refusals: dict[str, str] = {}
        """By decode engine: why it has not."""

    def begin(self, message: Prefill) -> None:
        req = self.admit(message.room, message.job, max_new_tokens=1)
        if req is None:
            return
        transfer = KVSender(
            message.room,
            num_tokens=req.seqlen,
            page_size=self.page_size,
            on_change=self.changed(message.room, req.rid),
        )
        if message.decode not in self.mapped:
            self.say(message.decode, Memory(self.source.offer(message.decode), is_mapped=False))
            self.mapped[message.decode] = False
        occupied = Occupied(message.room, req, message.decode, transfer)
        self.enter(occupied)
        if message.decode in self.refusals:
            self.fail(occupied, TransferError(f"nothing goes to {message.decode}: {self.refusals[message.decode]}"))

    def hear(self, origin: str, body: PeerMessage) -> None:
        match body:
            case Memory(_, True):
                if self.mapped.get(origin) is False:  # it may come twice
                    self.source.taken(origin)
                    self.mapped[origin] = True
            case MemoryRefused(why):
                self.refusals[origin] = why
                for occupied in [o for o in self.rooms.values() if o.peer == origin]:
                    self.fail(occupied, TransferError(f"{origin} refuses the memory between us: {why}"))
            case Taken(number):
                self.source.release(origin, number)
            case Preallocated(room, start) if room in self.rooms:
                occupied = self.rooms[room]
                if occupied.transfer.preallocated(start):
                    self.core.scheduler.bootstrapped(occupied.req.rid)
            case Received(room) if room in self.rooms:
                occupied = self.rooms[room]
                if occupied.transfer.received():
                    self.core.scheduler.finish_requests([occupied.req.rid], TAKEN_OVER)

    def forget_peer(self, name: str) -> None:
        self.refusals.pop(name, None)
        if self.mapped.pop(name, None) is not None:
            self.source.forget(name)

    def after_step(self) -> None:
        """Send what is complete; leave the rooms of requests that have ended."""
        for occupied in list(self.rooms.values()):
            if occupied.req.is_finished:
                self.leave(occupied)
            elif not occupied.transfer.state.is_final and occupied.req.to_finish is None:
                self._send_pages(occupied)

    def _send_pages(self, occupied: Occupied[KVSender]) -> None:
        """The next pages of a request, and behind the last ones its first token."""
        req, transfer = occupied.req, occupied.transfer
        if transfer.state is KVPoll.BOOTSTRAPPING or req.req_pool_idx is None or transfer.is_told:
            return
        at_most = max(self.source.num_frames // SHARE_OF_FRAMES, 1)
        while pages := transfer.pages_ready(req.kv_committed_len, at_most=at_most):
            if not self.mapped.get(occupied.peer) or not self._send(occupied, pages):
                return
        if req.status is RequestStatus.TRANSFERRING:
            try:
                self.say(occupied.peer, self._first_token(occupied))
                transfer.is_told = True
            except WireError as error:  # the log-probabilities of a prompt may be more than a message holds
                # not told to the peer: it would say that its transfer has failed, and that is tried anew, in vain
                self.fail(occupied, error, tell_peer=False)

    def _send(self, occupied: Occupied[KVSender], pages: range) -> bool:
        """Send these pages. False if there is no room for them now."""
        req, transfer = occupied.req, occupied.transfer
        began = time.perf_counter()
        pool, size = self.core.scheduler.pools.req_to_token_pool, self.page_size
        slots = pool.read(req.req_pool_idx, pages.start * size, min(pages.stop * size, req.kv_committed_len))
        ticket = self.source.send(occupied.peer, (slots[::size] // size).tolist())
        if ticket is None:
            return False
        number = transfer.sent(pages)
        self.tracer.emit(
            ChunkSent,
            rid=req.rid,
            room=occupied.room,
            number=number,
            to=occupied.peer,
            first_page=pages.start,
            num_pages=len(pages),
            num_bytes=len(pages) * self.page_bytes,
            is_last=pages.stop == transfer.end_page,
            seconds=time.perf_counter() - began,
        )
        self.say(occupied.peer, Chunk(occupied.room, number, pages.start, len(pages), ticket))
        return True

    def _first_token(self, occupied: Occupied[KVSender]) -> FirstToken:
        sequence = occupied.req.sequence
        of_prompt: tuple[Row, ...] | None = None
        if sequence.prompt_logprobs is not None:
            of_prompt = tuple(row for named in sequence.prompt_logprobs if (row := row_of(named)) is not None)
        return FirstToken(
            room=occupied.room,
            num_chunks=occupied.transfer.num_chunks,
            token_id=sequence.output_token_ids[-1],
            logprobs=row_of(sequence.output_logprobs[-1]),
            prompt_logprobs=of_prompt,
            cached_tokens=occupied.req.cached_tokens,
        )
