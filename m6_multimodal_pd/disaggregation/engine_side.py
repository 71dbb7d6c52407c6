"""The common part of both sides of a transfer: rooms whose KV comes from another engine, or goes to one.

In every tick a side looks at the copies that it has begun, and waits for none. New in this milestone. SGLang: the event
loops of `disaggregation/prefill.py` and `decode.py`, around its scheduler.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from m1_single_request.errors import EngineError
from m1_single_request.request import FinishError
from m6_multimodal_pd.disaggregation.config import Role
from m6_multimodal_pd.disaggregation.events import KVPollChanged
from m6_multimodal_pd.disaggregation.poll import KVPoll, Transfer
from m6_multimodal_pd.disaggregation.room_side import Room, RoomSide, error_of_end
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    Decode,
    FirstToken,
    PeerLost,
    PeerMessage,
    Prefill,
    Relay,
    RoomFailed,
    ToRouter,
)
from m6_multimodal_pd.disaggregation.staging import Arrival
from m6_multimodal_pd.errors import EngineLostError, TransferError
from m6_multimodal_pd.request import Req

T = TypeVar("T", bound=Transfer)


@dataclass(eq=False, kw_only=True)
class Occupied(Room, Generic[T]):
    """A room with a transfer."""

    peer: str
    """Name of the other engine."""
    transfer: T
    first_token: FirstToken | None = None
    """On the decode side: the message that came with the first token."""


@dataclass(frozen=True)
class InFlight(Generic[T]):
    """A chunk whose pages are being copied."""

    occupied: Occupied[T]
    chunk: Chunk
    began: float
    """When its copy began, by `time.perf_counter`."""
    arrival: Arrival | None = None
    """On the decode side: its pages."""


class EngineSide(RoomSide[Occupied[T]], Generic[T]):
    """Handles the messages to an engine, and sends its results after each step.

    `handle` also handles the messages of other engines, `free` ends a transfer, and `close` the transport."""

    role: Role

    def __init__(self, transport: Any, *, core: Any, send: Callable[[ToRouter], None]) -> None:
        """`transport`: this engine's end of it. `send`: to the router."""
        super().__init__(core=core, send=send)
        self.transport, self.page_bytes = transport, transport.store.page_bytes
        self.transport.tracer = core.tracer
        self.page_size = core.scheduler.pools.token_to_kv_pool_allocator.page_size
        self.in_flight: list[InFlight[T]] = []
        """Chunks in the order in which their copies began. A room may be left before."""

    # --- from the router ----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Handle a message. An error in it fails its room alone."""
        match message:
            case Relay(origin, body):
                self._handle_peer(origin, body)
            case PeerLost(name):
                self.transport.forget(name)
                self.in_flight = [each for each in self.in_flight if each.occupied.peer != name]
                for occupied in [o for o in self.rooms.values() if o.peer == name]:
                    self.fail(occupied, EngineLostError(f"engine {name!r} is gone"), tell_peer=False)
            case _:
                super().handle(message)

    @property
    def elsewhere(self) -> list[Req]:
        """Requests that wait for room, or for another engine."""
        return self.core.scheduler.elsewhere

    @abstractmethod
    def receive(self, origin: str, body: PeerMessage) -> None:
        """Handle a message of another engine. Raises `TransferError` for an invalid one, or without memory for a
        copy."""

    def close(self) -> None:
        """Release the memory of the transport."""
        self.transport.close()

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

    def enter(self, message: Prefill | Decode, req: Req, kind: type[T]) -> None:
        """Occupy a room with a request, and queue the request. `kind`: this side's end of a transfer."""
        transfer = kind(
            message.room,
            num_tokens=req.seqlen,
            page_size=self.page_size,
            on_change=partial(self._emit_change, message.room, req.rid),
        )
        num_reported = len(req.output_ids)
        self.rooms[message.room] = Occupied(message.room, req, num_reported, peer=message.peer, transfer=transfer)
        self.core.add_request(req)

    def fail(self, occupied: Occupied[T], error: EngineError, *, tell_peer: bool = True) -> None:
        """Fail the transfer of a room, and end its request with `error`, unless the transfer is complete."""
        if occupied.transfer.fail(str(error)):
            if tell_peer:
                self.say(occupied.peer, RoomFailed(occupied.room, str(error)[:LONGEST_TEXT]))
            self.core.scheduler.finish_requests([occupied.req.rid], FinishError(error))

    def free(self, room: Occupied[T]) -> None:
        """Free a room, and tell the other engine if the transfer was not complete."""
        error = error_of_end(room.req)
        why = "the request was aborted" if error is None else str(error)
        if room.transfer.fail(why):
            self.say(room.peer, RoomFailed(room.room, why[:LONGEST_TEXT]))
        super().free(room)

    def _emit_change(self, room: int, rid: str, before: KVPoll, after: KVPoll, why: str) -> None:
        self.tracer.emit(KVPollChanged, rid=rid, room=room, side=self.role, old=before.name, new=after.name, why=why)
