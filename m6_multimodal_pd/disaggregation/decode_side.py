"""The decode side: takes memory for a prompt, receives its KV, and continues from the first token.

Every chunk is copied at once, beside the steps, and put into its pages when the copy is done; the request runs when all
of them are there. From then on it is a request like any other: after a retraction its prompt is computed here, because
no other engine keeps its KV. New tokens go to the router after every step. SGLang:
`SchedulerDisaggregationDecodeMixin`.
"""

import time
from dataclasses import replace

import msgspec

from m1_single_request.sampler import LogprobRow, SampledTokens
from m6_multimodal_pd.disaggregation.engine_side import EngineSide, InFlight, Occupied
from m6_multimodal_pd.disaggregation.events import ChunkReceived, RoomTaken
from m6_multimodal_pd.disaggregation.poll import KVReceiver
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    Decode,
    FirstToken,
    Job,
    Offer,
    PeerMessage,
    Preallocated,
    Received,
    Taken,
)
from m6_multimodal_pd.disaggregation.staging import StagedTarget
from m6_multimodal_pd.errors import TransferError


class DecodeSide(EngineSide[KVReceiver]):
    """The side of an engine with a `DecodeScheduler`."""

    role = "decode"
    transport: StagedTarget

    def begin(self, message: Decode) -> None:
        req = self.admit(message.room, without_prompt_logprobs(message.job))
        if req is not None:
            self.enter(message, req, KVReceiver)

    def receive(self, origin: str, body: PeerMessage) -> None:
        match body:
            case Chunk(ticket=ticket) | Offer(ticket=ticket):
                coming, is_mapped, why = None, False, ""
                try:
                    self.transport.map(origin, ticket, body.memory if isinstance(body, Offer) else None)
                    is_mapped = True
                    coming = self._begin(origin, body) if isinstance(body, Chunk) else None
                except TransferError as error:
                    why = str(error)[:LONGEST_TEXT]
                    raise
                finally:
                    if coming is None:
                        self.say(origin, Taken(ticket.number, is_mapped, why))
                    else:
                        self.in_flight.append(coming)
                self._take_arrived()
            case FirstToken(room) if room in self.rooms:
                occupied = self.rooms[room]
                if occupied.transfer.first_token_arrived(body.num_chunks):
                    occupied.first_token = body
                    self._join_if_complete(occupied)

    def after_step(self) -> None:
        """Put pages into place that have come, take memory for waiting requests, send new tokens to the router, leave
        the rooms of ended requests."""
        if self.in_flight:
            self._take_arrived()
        for req in self.core.scheduler.preallocate():
            occupied = next(o for o in self.rooms.values() if o.req is req)
            occupied.transfer.preallocated(req.kv_committed_len)
            self.tracer.emit(
                RoomTaken,
                rid=req.rid,
                room=occupied.room,
                num_tokens=len(req.fill_ids),
                num_cached=req.kv_committed_len,
                num_pages=occupied.transfer.end_page - occupied.transfer.next_page,
                origin=occupied.peer,
            )
            self.say(occupied.peer, Preallocated(occupied.room, req.kv_committed_len, self.transport.readable))
        super().after_step()

    def with_first_token(self, room: Occupied[KVReceiver]) -> tuple[int, tuple[LogprobRow, ...] | None]:
        """Return what came with the KV."""
        assert room.first_token is not None, "no token is computed before it"
        return room.first_token.cached_tokens, room.first_token.prompt_logprobs

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, origin: str, chunk: Chunk) -> InFlight[KVReceiver] | None:
        """Begin to copy a chunk. None if its request has ended, or has it."""
        occupied = self.rooms.get(chunk.room)
        pages = range(chunk.first_page, chunk.first_page + chunk.num_pages)
        if occupied is None or not self._has_pages(occupied) or not occupied.transfer.expects(chunk.number, pages):
            return None
        began = time.perf_counter()
        own = tuple(self.core.scheduler.pages(occupied.req)[pages.start : pages.stop].tolist())
        arrival = self.transport.receive(origin, chunk.ticket, own)
        occupied.transfer.arrived(pages)
        return InFlight(occupied, chunk, began, arrival)

    def _take_arrived(self) -> None:
        """Put chunks that have come into their pages, in order, unless their request has ended; their frames are free
        then, and not before: on a CPU the pages are written from them. Pages are written here and nowhere else, between
        two steps: those of an ended request may belong to another one by now."""
        while self.in_flight:
            coming = self.in_flight[0]
            occupied, arrival = coming.occupied, coming.arrival
            assert arrival is not None
            if not arrival.copy.is_done():
                return
            del self.in_flight[0]
            is_written = False
            try:
                if self._has_pages(occupied):
                    arrival.write()
                    is_written = True
            except TransferError as error:
                self.fail(occupied, error)
            finally:
                self.say(occupied.peer, Taken(arrival.ticket.number, True))
            if is_written:
                self._emit_received(coming, tuple(arrival.pages))
                self._join_if_complete(occupied)

    def _has_pages(self, occupied: Occupied[KVReceiver]) -> bool:
        """Return whether the request of a room waits for KV, and the pages for it are its own."""
        return self.core.scheduler.transfer_queue.get(occupied.req.rid) is occupied.req

    def _emit_received(self, came: InFlight[KVReceiver], pages: tuple[int, ...]) -> None:
        self.tracer.emit(
            ChunkReceived,
            rid=came.occupied.req.rid,
            room=came.chunk.room,
            number=came.chunk.number,
            origin=came.occupied.peer,
            pages=pages,
            num_bytes=len(pages) * self.page_bytes,
            seconds=time.perf_counter() - came.began,
        )

    def _join_if_complete(self, occupied: Occupied[KVReceiver]) -> None:
        if self.is_copying(occupied) or occupied.req.to_finish is not None:
            return
        if occupied.transfer.complete():
            first = occupied.first_token
            assert first is not None, "it announces the number of chunks"
            self.core.scheduler.complete(occupied.req.rid, SampledTokens((first.token_id,), (first.logprobs,)))
            self.say(occupied.peer, Received(occupied.room))


def without_prompt_logprobs(job: Job) -> Job:
    """Return the job without log-probabilities of its prompt: the prefill engine sends them."""
    return msgspec.structs.replace(job, params=replace(job.params, prompt_logprobs=None))
