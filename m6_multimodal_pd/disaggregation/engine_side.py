"""What both sides of a transfer have in common: requests come from the router by room, and what is said goes back.

An engine's side stands between its messages and its engine core. It is called between two steps, never in one: what a
message changes is what a user could change (a request comes, a request is aborted) or a queue of the exchange. Whatever
comes late, twice or for a room that is over changes nothing. New in this milestone. SGLang: the event loops of
`disaggregation/prefill.py` and `decode.py`, around its scheduler.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from m1_single_request.errors import EngineDeadError, EngineError
from m1_single_request.request import FinishAbort, FinishError
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.events import KVPollChanged
from m6_multimodal_pd.disaggregation.poll import KVPoll, OnChange, Transfer
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT, fault_of, prompt_of, resume
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Cancel,
    Ended,
    Job,
    LengthFixed,
    PeerLost,
    PeerMessage,
    Probe,
    Relay,
    Relayed,
    Role,
    RoomFailed,
    ToRouter,
)
from m6_multimodal_pd.errors import EngineLostError, TransferError
from m6_multimodal_pd.request import Req

T = TypeVar("T", bound=Transfer)


@dataclass(eq=False)
class Occupied(Generic[T]):
    """A room, as one side knows it."""

    room: int
    req: Req
    peer: str
    transfer: T


class EngineSide(ABC, Generic[T]):
    """Answers messages, and looks after each step what there is to say."""

    role: Role

    def __init__(
        self, *, core: Any, send: Callable[[ToRouter], None], tracer: Tracer, page_size: int, page_bytes: int
    ) -> None:
        """`send`: to the router. `page_bytes`: of all KV of a page."""
        self.core, self.send, self.tracer = core, send, tracer
        self.page_size, self.page_bytes = page_size, page_bytes
        self.rooms: dict[int, Occupied[T]] = {}
        self.newest_room = -1
        """Rooms come in the order of their numbers, each once."""

    # --- from the router ----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Do what a message asks for. What is wrong with it fails its room, and nothing else."""
        match message:
            case Relayed(origin, body):
                self._hear(origin, body)
            case Cancel(room):
                if room in self.rooms:
                    self.core.abort_request(self.rooms[room].req.rid)
            case PeerLost(name):
                self.forget_peer(name)
                for occupied in [o for o in self.rooms.values() if o.peer == name]:
                    self.fail(occupied, EngineLostError(f"engine {name!r} is gone"), tell_peer=False)
            case Probe() | LengthFixed():  # the length is told again if the router was interrupted meanwhile
                pass
            case _ if message.room > self.newest_room:
                self.newest_room = message.room
                self.begin(message)

    @abstractmethod
    def begin(self, message: Any) -> None:
        """A request comes."""

    @abstractmethod
    def hear(self, origin: str, body: PeerMessage) -> None:
        """Another engine says something. Raises `TransferError` for what cannot be."""

    @abstractmethod
    def forget_peer(self, name: str) -> None:
        """An engine is gone."""

    @abstractmethod
    def after_step(self) -> None:
        """Say what there is to say, and give up what is over."""

    # --- for both -----------------------------------------------------------------------------------------------------

    def _hear(self, origin: str, body: PeerMessage) -> None:
        room = getattr(body, "room", None)
        occupied = self.rooms.get(room) if isinstance(room, int) else None
        if occupied is not None and occupied.peer != origin:
            return  # it is not its room
        try:
            if isinstance(body, RoomFailed):
                if occupied is not None:
                    self.fail(occupied, TransferError(f"{origin}: {body.why}"), tell_peer=False)
            else:
                self.hear(origin, body)
        except TransferError as error:
            if occupied is not None:
                self.fail(occupied, error)

    def say(self, peer: str, body: PeerMessage) -> None:
        """To another engine."""
        self.send(Relay(peer, body))

    def admit(self, room: int, job: Job, **changes: Any) -> Req | None:
        """Take a request in, or tell the router why not."""
        processor, scheduler = self.core.input_processor, self.core.scheduler
        rid = job.rid if job.rid not in scheduler.requests else f"{job.rid}@{room}"
        tokens = None if processor.prompts is None else processor.prompts.tokens
        try:
            req: Req = processor.process_request(
                rid,
                prompt_of(job, tokens),
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
        for name, value in changes.items():
            setattr(req, name, value)
        resume(req, job.output_token_ids)
        return req

    def enter(self, occupied: Occupied[T]) -> None:
        """The request is known from now on."""
        self.rooms[occupied.room] = occupied
        self.core.add_request(occupied.req)

    def fail(self, occupied: Occupied[T], error: EngineError, *, tell_peer: bool = True) -> None:
        """Nothing comes of a room: its request ends, unless it does not need the room any more."""
        if occupied.transfer.fail(str(error)):
            if tell_peer:
                self.say(occupied.peer, RoomFailed(occupied.room, str(error)[:LONGEST_TEXT]))
            self.core.scheduler.finish_requests([occupied.req.rid], FinishError(error))

    def leave(self, occupied: Occupied[T]) -> None:
        """The request has ended: the room is over, and the router is told."""
        del self.rooms[occupied.room]
        reason = occupied.req.finish_reason
        why = "the request was aborted" if isinstance(reason, FinishAbort) else "the request has ended"
        if isinstance(reason, FinishError):
            why = str(reason.error)
        if occupied.transfer.fail(why):
            self.say(occupied.peer, RoomFailed(occupied.room, why[:LONGEST_TEXT]))
        if isinstance(reason, FinishError):
            may_retry = isinstance(reason.error, TransferError | EngineLostError | EngineDeadError)
            self.send(Ended(occupied.room, fault_of(reason.error), may_retry))
        else:
            self.send(Ended(occupied.room, None, False))

    def changed(self, room: int, rid: str) -> OnChange:
        """What tells the trace of this room's transitions."""

        def tell(before: KVPoll, after: KVPoll, why: str) -> None:
            self.tracer.emit(
                KVPollChanged, rid=rid, room=room, side=self.role, old=before.name, new=after.name, why=why
            )

        return tell
