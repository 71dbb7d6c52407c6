"""The common part of both sides of a transfer: requests come from the router by room, and results go back to it.

A side stands between the messages of an engine and its engine core. It is called between two steps, never in one: a
message changes what a user could change (it adds or aborts a request), or a queue of the scheduler. A message that is
late, comes twice, or is for a room that has ended changes nothing. In every tick it looks at the copies that it has
begun, and waits for none. New in this milestone. SGLang: the event loops of `disaggregation/prefill.py` and
`decode.py`, around its scheduler.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from m1_single_request.errors import EngineDeadError, EngineError
from m1_single_request.request import FinishError
from m6_multimodal_pd.disaggregation.events import KVPollChanged
from m6_multimodal_pd.disaggregation.poll import KVPoll, Transfer
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT, fault_of, resume
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Cancel,
    Chunk,
    Decode,
    Ended,
    FirstToken,
    Job,
    PeerLost,
    PeerMessage,
    Prefill,
    Relay,
    Role,
    RoomFailed,
    ToRouter,
)
from m6_multimodal_pd.disaggregation.staging import Arrival
from m6_multimodal_pd.errors import EngineLostError, TransferError
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from m6_multimodal_pd.request import Req

T = TypeVar("T", bound=Transfer)


@dataclass(eq=False)
class Occupied(Generic[T]):
    """A room, as one side knows it."""

    room: int
    req: Req
    peer: str
    """Name of the other engine."""
    transfer: T
    num_reported: int
    """Number of output tokens that the router has."""
    first_token: FirstToken | None = None
    """On the decode side: the message that came with the first token, until the router has its content."""


@dataclass(frozen=True)
class InFlight(Generic[T]):
    """A chunk whose pages are being copied."""

    occupied: Occupied[T]
    chunk: Chunk
    began: float
    """When its copy began, by `time.perf_counter`."""
    arrival: Arrival | None = None
    """On the decode side: its pages."""


class EngineSide(ABC, Generic[T]):
    """Handles the messages to an engine, and sends its results after each step."""

    role: Role

    def __init__(self, transport: Any, *, core: Any, send: Callable[[ToRouter], None]) -> None:
        """`transport`: this engine's end of it. `send`: to the router."""
        self.transport, self.page_bytes = transport, transport.store.page_bytes
        self.core, self.send, self.tracer = core, send, core.tracer
        self.transport.tracer = core.tracer
        self.page_size = core.scheduler.pools.token_to_kv_pool_allocator.page_size
        self.rooms: dict[int, Occupied[T]] = {}
        self.in_flight: list[InFlight[T]] = []
        """Chunks in the order in which their copies began. A room may be left before."""
        self.newest_room = -1
        """Rooms come in the order of their numbers, each once."""

    # --- from the router ----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Handle a message. An error in it fails its room alone."""
        match message:
            case Relay(origin, body):
                self._handle_peer(origin, body)
            case Cancel(room):
                if room in self.rooms:
                    self.core.abort_request(self.rooms[room].req.rid)
            case PeerLost(name):
                self.transport.forget(name)
                self.in_flight = [each for each in self.in_flight if each.occupied.peer != name]
                for occupied in [o for o in self.rooms.values() if o.peer == name]:
                    self.fail(occupied, EngineLostError(f"engine {name!r} is gone"), tell_peer=False)
            case Prefill(room) | Decode(room) if room > self.newest_room:
                self.newest_room = room
                self.begin(message)

    @abstractmethod
    def begin(self, message: Any) -> None:
        """Take a request in."""

    @abstractmethod
    def receive(self, origin: str, body: PeerMessage) -> None:
        """Handle a message of another engine. Raises `TransferError` for an invalid one, or without memory for a
        copy."""

    @abstractmethod
    def after_step(self) -> None:
        """Send what is there to be sent, and leave the rooms of requests that have ended. Called in every tick, after
        its step if it has one. Raises `EngineDeadError` if a copy finds its device lost."""

    # --- for both sides -----------------------------------------------------------------------------------------------

    def _handle_peer(self, origin: str, body: PeerMessage) -> None:
        """Handle a message of another engine, unless it is for a room of others. `Taken` is for a ticket and has no
        room: the frames of a chunk are released also when its request has ended."""
        occupied = self.rooms.get(getattr(body, "room", -1))
        if occupied is not None and occupied.peer != origin:
            return  # a room of other engines
        try:
            if not isinstance(body, RoomFailed):
                self.receive(origin, body)
            elif occupied is not None:
                self.fail(occupied, TransferError(f"{origin}: {body.why}"), tell_peer=False)
        except TransferError as error:
            if occupied is not None:
                self.fail(occupied, error)

    def is_copying(self, occupied: Occupied[T]) -> bool:
        """Return whether pages of this room are being copied."""
        return any(each.occupied is occupied for each in self.in_flight)

    def say(self, peer: str, body: PeerMessage) -> None:
        """Send a message to another engine."""
        self.send(Relay(peer, body))

    def admit(self, room: int, job: Job) -> Req | None:
        """Return the request of a job; None if intake rejects it, which the router learns."""
        rid = job.rid if job.rid not in self.core.scheduler.requests else f"{job.rid}@{room}"
        try:
            req: Req = self.core.input_processor.process_request(
                rid,
                ChatPrompt(job.prompt_token_ids, job.media),
                job.params,
                number=0,
                arrival_time=time.monotonic(),
                priority=job.priority,
                cache_salt=job.cache_salt,
                speculate=job.speculate,
            )
        except EngineError as error:
            self.send(Ended(room, fault_of(error), may_retry=False))
            return None
        req.seed, req.final_only = job.seed, True
        resume(req, job.output_token_ids)
        return req

    def enter(self, message: Prefill | Decode, req: Req, kind: type[T]) -> None:
        """Occupy a room with a request, and queue the request. `kind`: this side's end of a transfer."""
        transfer = kind(
            message.room,
            num_tokens=req.seqlen,
            page_size=self.page_size,
            on_change=partial(self._emit_change, message.room, req.rid),
        )
        self.rooms[message.room] = Occupied(message.room, req, message.peer, transfer, len(req.output_ids))
        self.core.add_request(req)

    def fail(self, occupied: Occupied[T], error: EngineError, *, tell_peer: bool = True) -> None:
        """Fail the transfer of a room, and end its request with `error`, unless the transfer is complete."""
        if occupied.transfer.fail(str(error)):
            if tell_peer:
                self.say(occupied.peer, RoomFailed(occupied.room, str(error)[:LONGEST_TEXT]))
            self.core.scheduler.finish_requests([occupied.req.rid], FinishError(error))

    def leave(self, occupied: Occupied[T]) -> None:
        """Free the room of a request that has ended, and report the end to the router."""
        del self.rooms[occupied.room]
        reason = occupied.req.finish_reason
        error = reason.error if isinstance(reason, FinishError) else None
        why = "the request was aborted" if error is None else str(error)
        if occupied.transfer.fail(why):
            self.say(occupied.peer, RoomFailed(occupied.room, why[:LONGEST_TEXT]))
        may_retry = isinstance(error, TransferError | EngineLostError | EngineDeadError)
        self.send(Ended(occupied.room, None if error is None else fault_of(error), may_retry))

    def _emit_change(self, room: int, rid: str, before: KVPoll, after: KVPoll, why: str) -> None:
        self.tracer.emit(KVPollChanged, rid=rid, room=room, side=self.role, old=before.name, new=after.name, why=why)
