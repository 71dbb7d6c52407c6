"""The common part of all engines of a group: requests come from the router by room, and results go back to it.

The router numbers each attempt at a request: that is its room. A side stands between the messages of an engine and its
engine core. It is called between two steps, never in one: a message changes what a user could change (it adds or aborts
a request), or a queue of the scheduler. A message that is late, comes twice, or is for a room that has ended changes
nothing. `EngineSide` adds the transfers of KV; an engine with the role `both` needs no more than this file
(`BothSide`). New in this milestone. SGLang: `process_input_requests` and `send_to_detokenizer` of its scheduler; vLLM:
`EngineCoreProc` in `v1/engine/core.py`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from m1_single_request.errors import EngineDeadError, EngineError
from m1_single_request.request import FinishError
from m1_single_request.sampler import LogprobRow
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of, resume, row_of
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Cancel,
    Decode,
    Ended,
    Generate,
    Job,
    Prefill,
    Tokens,
    ToRouter,
)
from m6_multimodal_pd.errors import EngineLostError, TransferError, WireError
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from m6_multimodal_pd.request import Req


@dataclass(eq=False)
class Room:
    """A room with its request, as one engine records it."""

    room: int
    req: Req
    num_reported: int
    """Number of output tokens that the router has."""
    is_new: bool = True
    """Whether nothing was reported from here."""


R = TypeVar("R", bound=Room)


class RoomSide(ABC, Generic[R]):
    """Handles the messages to an engine, and sends its results after each step."""

    in_flight: Sequence[Any] = ()
    """Copies of KV that have begun and not ended."""

    def __init__(self, *, core: Any, send: Callable[[ToRouter], None]) -> None:
        """`send`: to the router."""
        self.core, self.send, self.tracer = core, send, core.tracer
        self.rooms: dict[int, R] = {}
        self.newest_room = -1
        """Rooms come in the order of their numbers, each once."""

    def handle(self, message: Any) -> None:
        """Handle a message. A job that intake rejects fails its room alone."""
        match message:
            case Cancel(room):
                if room in self.rooms:
                    self.core.abort_request(self.rooms[room].req.rid)
            case Prefill(room) | Decode(room) | Generate(room) if room > self.newest_room:
                self.newest_room = room
                self.begin(message)

    @property
    def elsewhere(self) -> Sequence[Req]:
        """Requests that wait for another engine."""
        return ()

    @abstractmethod
    def begin(self, message: Any) -> None:
        """Take a request in."""

    def after_step(self) -> None:
        """Send new tokens, and free the rooms of requests that have ended. Called in every turn of the engine's loop,
        after its step if it has one. Raises `EngineDeadError` if a copy finds its device lost."""
        for room in list(self.rooms.values()):
            if len(room.req.output_ids) > room.num_reported:
                self._report(room)
            if room.req.is_finished:
                self.free(room)

    def with_first_token(self, room: R) -> tuple[int, tuple[LogprobRow, ...] | None]:
        """Return what the first report of a room adds: cached tokens, and the log-probabilities of the prompt from its
        second token on, if the request asks for them."""
        named = room.req.sequence.prompt_logprobs
        rows = None if named is None else tuple(row for row in map(row_of, named) if row is not None)
        return room.req.cached_tokens, rows

    def close(self) -> None:
        """Release the memory that is not the engine core's."""

    def admit(self, room: int, job: Job) -> Req | None:
        """Return the request of a job; None if intake rejects it: then the router receives the error."""
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

    def _report(self, room: R) -> None:
        """Send the tokens that the router does not have."""
        req, first = room.req, room.num_reported
        cached_tokens, prompt_logprobs = self.with_first_token(room) if room.is_new else (0, None)
        new = req.output_ids[first:]
        logprobs: tuple[LogprobRow | None, ...] = (None,) * len(new)
        if req.sampling_params.logprobs is not None:
            logprobs = tuple(map(row_of, req.sequence.output_logprobs[first:]))
        tokens = Tokens(
            room=room.room,
            first=first,
            token_ids=tuple(new),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
            num_draft_tokens=req.num_draft_tokens,
            num_accepted_tokens=req.num_accepted_tokens,
        )
        room.num_reported, room.is_new = first + len(new), False
        try:
            self.send(tokens)
        except WireError as error:  # log-probabilities may be too large for a message
            self.core.scheduler.finish_requests([req.rid], FinishError(error))

    def free(self, room: R) -> None:
        """Free the room of a request that has ended, and report the end to the router."""
        del self.rooms[room.room]
        error = error_of_end(room.req)
        may_retry = isinstance(error, TransferError | EngineLostError | EngineDeadError)
        self.send(Ended(room.room, None if error is None else fault_of(error), may_retry))


class BothSide(RoomSide[Room]):
    """The side of an engine that computes prompts and answers."""

    def begin(self, message: Generate) -> None:
        req = self.admit(message.room, message.job)
        if req is not None:
            self.rooms[message.room] = Room(message.room, req, len(req.output_ids))
            self.core.add_request(req)


def error_of_end(req: Req) -> BaseException | None:
    """Return the error with which a request has ended, or None."""
    return req.finish_reason.error if isinstance(req.finish_reason, FinishError) else None
