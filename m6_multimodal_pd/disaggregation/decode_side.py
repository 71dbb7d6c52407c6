"""The side that answers: it takes room for a prompt, takes its KV in, and goes on from the first token.

What comes is put into its place at once, chunk by chunk; the request runs when everything is there. From then on it is
one like any other: if it loses its place it is computed again here, prompt and all, for nobody keeps its KV elsewhere.
New tokens are told to the router after every step. SGLang: `SchedulerDisaggregationDecodeMixin`.
"""

import time
from dataclasses import replace
from typing import Any

import msgspec

from m1_single_request.request import FinishError
from m6_multimodal_pd.disaggregation.engine_side import EngineSide, Occupied
from m6_multimodal_pd.disaggregation.events import ChunkReceived, RoomTaken
from m6_multimodal_pd.disaggregation.poll import KVReceiver
from m6_multimodal_pd.disaggregation.prebuilt import FirstToken as Came
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT, row_of, to_row
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    Decode,
    FirstToken,
    Job,
    Memory,
    MemoryRefused,
    PeerMessage,
    Preallocated,
    Received,
    Row,
    Taken,
    Tokens,
)
from m6_multimodal_pd.disaggregation.staging import StagedTarget
from m6_multimodal_pd.disaggregation.transport import Offer
from m6_multimodal_pd.errors import TransferError, WireError


class DecodeSide(EngineSide[KVReceiver]):
    """The side of an engine with a `DecodeScheduler`."""

    role = "decode"

    def __init__(self, *, target: StagedTarget, **settings: Any) -> None:
        """`settings`: as of every `EngineSide`."""
        super().__init__(**settings)
        self.target = target
        self.accepted: dict[str, Offer] = {}
        """By prefill engine: the memory between the two."""
        self.of_prompts: dict[int, FirstToken] = {}
        """By room: what came with the first token, until the router is told."""
        self.num_told: dict[int, int] = {}
        """By room: output tokens that the router knows."""

    def begin(self, message: Decode) -> None:
        req = self.admit(message.room, without_prompt_logprobs(message.job))
        if req is None:
            return
        transfer = KVReceiver(
            message.room,
            num_tokens=req.seqlen,
            page_size=self.page_size,
            on_change=self.changed(message.room, req.rid),
        )
        self.num_told[message.room] = len(req.output_ids)
        self.enter(Occupied(message.room, req, message.prefill, transfer))

    def hear(self, origin: str, body: PeerMessage) -> None:
        match body:
            case Memory(offer, False):
                try:
                    if self.accepted.get(origin) != offer:  # it may come twice
                        self.target.accept(origin, offer)
                    self.accepted[origin] = offer
                except TransferError as error:
                    self.say(origin, MemoryRefused(str(error)[:LONGEST_TEXT]))
                else:
                    self.say(origin, Memory(offer, is_mapped=True))
            case Chunk():
                try:
                    self._take(origin, body)
                finally:
                    self.say(origin, Taken(body.ticket.number))
            case FirstToken(room) if room in self.rooms:
                if self.rooms[room].transfer.told(body.num_chunks):
                    self.of_prompts[room] = body
                    self._join_if_complete(self.rooms[room])

    def forget_peer(self, name: str) -> None:
        self.accepted.pop(name, None)
        self.target.forget(name)

    def after_step(self) -> None:
        """Take room for those who wait for it; tell the router of new tokens; leave rooms that are over."""
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
            self.say(occupied.peer, Preallocated(occupied.room, req.kv_committed_len))
        for occupied in list(self.rooms.values()):
            self._tell(occupied)
            if occupied.req.is_finished:
                self.leave(occupied)
                self.of_prompts.pop(occupied.room, None)
                del self.num_told[occupied.room]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take(self, origin: str, chunk: Chunk) -> None:
        """Put a chunk into its pages; nothing happens if nobody waits for it any more."""
        occupied = self.rooms.get(chunk.room)
        pages = range(chunk.first_page, chunk.first_page + chunk.num_pages)
        if occupied is None or occupied.req.rid not in self.core.scheduler.transfer_queue:
            return
        if not occupied.transfer.expects(chunk.number, pages):
            return
        began = time.perf_counter()
        own = tuple(self.core.scheduler.pages(occupied.req)[pages.start : pages.stop].tolist())
        self.target.receive(origin, chunk.ticket, own)
        occupied.transfer.arrived(pages)
        self.tracer.emit(
            ChunkReceived,
            rid=occupied.req.rid,
            room=chunk.room,
            number=chunk.number,
            origin=origin,
            pages=own,
            num_bytes=len(own) * self.page_bytes,
            seconds=time.perf_counter() - began,
        )
        self._join_if_complete(occupied)

    def _join_if_complete(self, occupied: Occupied[KVReceiver]) -> None:
        if occupied.req.to_finish is None and occupied.transfer.complete():
            first = self.of_prompts[occupied.room]
            self.core.scheduler.complete(occupied.req.rid, Came(first.token_id, to_row(first.logprobs)))
            self.say(occupied.peer, Received(occupied.room))

    def _tell(self, occupied: Occupied[KVReceiver]) -> None:
        """The tokens that the router has not heard of."""
        req, room = occupied.req, occupied.room
        first = self.num_told[room]
        new = req.output_ids[first:]
        if not new:
            return
        came = self.of_prompts.pop(room, None)
        logprobs: tuple[Row | None, ...] = (None,) * len(new)
        if req.sampling_params.logprobs is not None:
            logprobs = tuple(row_of(named) for named in req.sequence.output_logprobs[first:])
        tokens = Tokens(
            room=room,
            first=first,
            token_ids=tuple(new),
            logprobs=logprobs,
            prompt_logprobs=came.prompt_logprobs if came is not None else None,
            cached_tokens=came.cached_tokens if came is not None else 0,
            num_draft_tokens=req.num_draft_tokens,
            num_accepted_tokens=req.num_accepted_tokens,
        )
        self.num_told[room] = first + len(new)
        try:
            self.send(tokens)
        except WireError as error:  # log-probabilities may be more than a message holds
            self.core.scheduler.finish_requests([req.rid], FinishError(error))


def without_prompt_logprobs(job: Job) -> Job:
    """The job without the prompt's log-probabilities: they come from where the prompt is computed."""
    return msgspec.structs.replace(job, params=replace(job.params, prompt_logprobs=None))
