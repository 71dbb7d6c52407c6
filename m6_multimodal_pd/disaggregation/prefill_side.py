"""The prefill side: chunks of a prompt's KV leave while later pieces of the prompt are still being computed.

In every tick of its engine, with a step or without, it sends the pages of each prompt that are complete; the last page
goes with the end of the prompt, full or not. The message about a chunk is sent when its pages are copied. The first
token follows, with the number of chunks, so that the decode side can check that it has all of them. Without free frames
the pages wait in their places for a later tick. SGLang: `SchedulerDisaggregationPrefillMixin.send_kv_chunk`.
"""

import time

import msgspec

from m1_single_request.request import RequestStatus
from m6_multimodal_pd.disaggregation.engine_side import EngineSide, InFlight, Occupied
from m6_multimodal_pd.disaggregation.events import ChunkSent
from m6_multimodal_pd.disaggregation.first_token import TAKEN_OVER
from m6_multimodal_pd.disaggregation.poll import KVPoll, KVSender
from m6_multimodal_pd.disaggregation.runtime.jobs import row_of
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    FirstToken,
    PeerMessage,
    Preallocated,
    Prefill,
    Received,
    Taken,
)
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.errors import TransferError, WireError

SHARE_OF_FRAMES = 4
"""A chunk takes at most this part of the frames, so that other requests can send beside it."""


class PrefillSide(EngineSide[KVSender]):
    """The side of an engine with a `PrefillScheduler`."""

    role = "prefill"
    transport: StagedSource

    def begin(self, message: Prefill) -> None:
        req = self.admit(message.room, message.job)
        if req is not None:
            req.max_new_tokens = 1
            self.enter(message, req, KVSender)

    def receive(self, origin: str, body: PeerMessage) -> None:
        match body:
            case Taken(number, is_mapped=True):
                self.transport.release(origin, number)
            case Taken(number, why=why):
                self.transport.refused(origin, number, why)
            case Preallocated(room, start, devices) if room in self.rooms:
                if (offer := self.transport.offer(origin, devices)) is not None:
                    self.say(origin, offer)
                occupied = self.rooms[room]
                if occupied.transfer.preallocated(start):
                    self.core.scheduler.bootstrapped(occupied.req.rid)
            case Received(room) if room in self.rooms:
                occupied = self.rooms[room]
                if occupied.transfer.received():
                    self.core.scheduler.finish_requests([occupied.req.rid], TAKEN_OVER)

    def after_step(self) -> None:
        """Send pages that are complete; leave the rooms of requests that have ended."""
        if self.in_flight:
            self._say_ready()
        for occupied in list(self.rooms.values()):
            if occupied.req.is_finished:
                self.free(occupied)
            elif not occupied.transfer.state.is_final and occupied.req.to_finish is None:
                try:
                    self._send_pages(occupied)
                except TransferError as error:
                    self.fail(occupied, error)
                except WireError as error:  # the log-probabilities of a prompt may be too large for a message
                    # the peer is not informed: it would report a failed transfer, which is tried again, in vain
                    self.fail(occupied, error, tell_peer=False)

    def _send_pages(self, occupied: Occupied[KVSender]) -> None:
        """Send the next pages of a request, and its first token after the last ones."""
        req, transfer = occupied.req, occupied.transfer
        if transfer.state is KVPoll.BOOTSTRAPPING or req.req_pool_idx is None or transfer.has_sent_first_token:
            return
        at_most = max(self.transport.num_frames // SHARE_OF_FRAMES, 1)
        while pages := transfer.pages_ready(req.kv_committed_len, at_most=at_most):
            if not self._send(occupied, pages):
                return
        if req.status is RequestStatus.TRANSFERRING and not self.is_copying(occupied):
            self.say(occupied.peer, self._first_token(occupied))
            transfer.has_sent_first_token = True

    def _send(self, occupied: Occupied[KVSender], pages: range) -> bool:
        """Begin to send these pages. Return False if there are no free frames for them now."""
        req, transfer = occupied.req, occupied.transfer
        began = time.perf_counter()
        pool, size = self.core.scheduler.pools.req_to_token_pool, self.page_size
        slots = pool.read(req.req_pool_idx, pages.start * size, min(pages.stop * size, req.kv_committed_len))
        ticket = self.transport.send(occupied.peer, (slots[::size] // size).tolist())
        if ticket is None:
            return False
        chunk = Chunk(occupied.room, transfer.sent(pages), pages.start, len(pages), ticket)
        self.in_flight.append(InFlight(occupied, chunk, began))
        self._say_ready()
        return True

    def _say_ready(self) -> None:
        """Send the messages about the chunks whose pages are in their frames, also for rooms that have ended: the
        decode side frees the frames."""
        while self.in_flight:
            occupied, chunk, began = self.in_flight[0].occupied, self.in_flight[0].chunk, self.in_flight[0].began
            ticket = self.transport.ready(occupied.peer, chunk.ticket)
            if ticket is None:
                return
            del self.in_flight[0]
            self.tracer.emit(
                ChunkSent,
                rid=occupied.req.rid,
                room=chunk.room,
                number=chunk.number,
                to=occupied.peer,
                first_page=chunk.first_page,
                num_pages=chunk.num_pages,
                num_bytes=chunk.num_pages * self.page_bytes,
                is_last=chunk.first_page + chunk.num_pages == occupied.transfer.end_page,
                seconds=time.perf_counter() - began,
            )
            self.say(occupied.peer, msgspec.structs.replace(chunk, ticket=ticket))

    def _first_token(self, occupied: Occupied[KVSender]) -> FirstToken:
        sequence = occupied.req.sequence
        cached_tokens, prompt_logprobs = self.with_first_token(occupied)
        return FirstToken(
            room=occupied.room,
            num_chunks=occupied.transfer.num_chunks,
            token_id=sequence.output_token_ids[-1],
            logprobs=row_of(sequence.output_logprobs[-1]),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
        )
