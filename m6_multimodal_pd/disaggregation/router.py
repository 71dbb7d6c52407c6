"""In front of all engines: who computes a prompt, who answers it, and what becomes of requests when an engine is lost.

To the engine core above it the router is a scheduler: it has requests, and some of them change in a step. It gives each
request a room, which no other request ever gets, and tells a prefill and a decode engine of it. Tokens come back as
numbers; whether they end the request the router asks the same stop checker as the engine that said them, so both know.
If an engine is lost or a transfer fails, the request gets another room: it goes on behind the tokens that were said,
and because a draw depends on seed and position alone, with the same ones. Nothing is said twice. New in this milestone.
SGLang: `disaggregation/mini_lb.py` (now the router of its own package); vLLM: a proxy in front of two servers.
"""

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from m1_single_request.errors import DuplicateRequestError, EngineError, shown
from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, FinishError, Request, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.events import EngineJoined, EngineLost, EngineRefused, Reported, RequestRouted
from m6_multimodal_pd.disaggregation.length import GroupLength
from m6_multimodal_pd.disaggregation.members import Member, load_of, misfit
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of, job_of
from m6_multimodal_pd.disaggregation.runtime.links import Links
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Answer,
    Call,
    Cancel,
    Decode,
    Ended,
    Heartbeat,
    Joined,
    LengthFitted,
    PeerLost,
    Prefill,
    Relay,
    Relayed,
    Role,
    ToEngine,
    Tokens,
    Told,
    ToRouter,
)
from m6_multimodal_pd.errors import EngineLostError, PeerLostError, TransferError, WireError
from m6_multimodal_pd.request import Req

ON_JOINING = 0
"""The number of a call that nobody waits for."""
WATCHDOG_GRACE_S = 30.0
"""So long after `step_timeout_s` the watchdog of an engine must have ended it."""


@dataclass(eq=False)
class Attempt:
    """A request in a room."""

    room: int
    req: Req
    prefill: str
    decode: str
    number: int
    """1 for the first."""


class Router:
    """Requests in, requests that changed out. Belongs to one thread, and never waits longer than it is told to."""

    def __init__(
        self,
        *,
        links: Links,
        config: DisaggregationConfig,
        stop_checker: StopChecker,
        speculates: bool,
        vocabulary: str,
        tracer: Tracer,
    ) -> None:
        """`speculates`: whether engines may guess for requests that do not refuse it. `vocabulary`: of the tokenizer
        that makes texts here (see `vocabulary_of`)."""
        self.links, self.config, self.speculates, self.tracer = links, config, speculates, tracer
        self.vocabulary = vocabulary
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.members: dict[str, Member] = {}
        self.length = GroupLength(weakref.proxy(self))  # without cycles a group ends where its last user drops it
        self.refused: dict[str, str] = {}
        """By role: the last one that did not fit, and why."""
        self.requests: dict[str, Req] = {}
        self.attempts: dict[int, Attempt] = {}
        self.num_attempts: dict[str, int] = {}  # by request id: those that came to nothing
        self.answers: dict[int, Answer] = {}
        """By the number of a call that somebody waits for."""
        self.weights: str | None = None
        """What an engine that joins must load first: weights were exchanged since engines were ordered."""
        self.num_retries = 0
        self._next_room = 0
        self._room_of: dict[str, int] = {}  # by request id; there are those among them that are over

    # --- what an engine core asks of a scheduler ----------------------------------------------------------------------

    @property
    def running(self) -> list[Req]:
        return [req for req in self.requests.values() if self._room_of.get(req.rid) in self.attempts]

    @property
    def waiting(self) -> list[Req]:
        """Those for whom there is no engine yet."""
        return [req for req in self.requests.values() if self._room_of.get(req.rid) not in self.attempts]

    def add_request(self, request: Request) -> None:
        """Take a request in; it is routed with the next update."""
        assert isinstance(request, Req)
        if request.rid in self.requests:
            raise DuplicateRequestError(f"request id {shown(request.rid)} is in use: it has not finished yet")
        self.tracer.emit(RequestAdded.of, request, len(self.waiting))
        if request.multimodal_inputs is not None:
            request.multimodal_inputs.trace_arrival(request.rid, self.tracer)
        self.requests[request.rid] = request

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark requests to end with the next update. Returns the ids that were marked."""
        known = {rid: self.requests[rid] for rid in request_ids if rid in self.requests}
        return [rid for rid, req in known.items() if self.updater.mark(req, reason)]

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step; their rooms are cancelled."""
        requests, self.requests = self.requests, {}
        for attempt in list(self.attempts.values()):
            self._give_up(attempt)
        self._room_of.clear()
        self.num_attempts.clear()
        for req in requests.values():
            self.updater.end(req, reason)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens since the start, of all requests."""
        return self.updater.num_output_tokens

    # --- a step -------------------------------------------------------------------------------------------------------

    def update(self, timeout_s: float) -> list[Req]:
        """Route waiting requests, receive messages, end marked requests. Returns the requests that changed."""
        for req in self.waiting:
            if req.to_finish is None:
                self._route(req)
        changed = self.listen(0.0 if self._marked() else timeout_s)
        marked = self._marked()
        changed += [req for req in marked if req not in changed]
        for req in marked:
            self._finish(req)
        return changed

    def listen(self, timeout_s: float) -> list[Req]:
        """Hear what has come, and who is lost. Returns the requests that got something."""
        changed = self.hear(timeout_s)
        for lost in self.links.lost():
            self.lose(lost.name, lost.why)
        if self.config.transport != "in_process":
            self._lose_silent(time.monotonic())
        return changed

    def hear(self, timeout_s: float) -> list[Req]:
        """Hear what has come. Returns the requests that got something."""
        changed: dict[str, Req] = {}
        for name, message in self.links.receive(timeout_s):
            try:
                req = self._hear(name, message)
            except Exception as error:  # not a second time: it would be the same, for all messages behind it, too
                self.lose(name, f"the router failed at what it said: {error!r}")
                continue
            if req is not None:
                changed[req.rid] = req
        return list(changed.values())

    def of_role(self, role: str) -> list[Member]:
        """The engines of a role, in order of their names."""
        return [self.members[name] for name in sorted(self.members) if self.members[name].joined.role == role]

    # --- inside: messages ---------------------------------------------------------------------------------------------

    def _hear(self, name: str, message: ToRouter) -> Req | None:
        """Take a message; returns the request that it has changed."""
        member = self.members.get(name)
        if isinstance(message, Joined):
            self._join(name, message)
            return None
        if isinstance(message, LengthFitted):
            self.length.report(name, message)
            return None
        if member is None:
            return None
        member.last_heard = time.monotonic()
        match message:
            case Heartbeat():
                member.heartbeat = message
            case Told():
                self._pass_on(name, message)
            case Relay(to, body):
                self.send(to, Relayed(name, body))
            case Answer(number):
                if number in self.answers:
                    self.answers[number] = message
                elif number == ON_JOINING and message.fault is not None:
                    self.lose(name, f"it cannot load {self.weights}: {message.fault.text}")
            case Tokens():
                return self._take_tokens(name, message)
            case Ended():
                self._hear_of_end(name, message)
        return None

    def _pass_on(self, name: str, told: Told) -> None:
        """To the readers of the trace here."""
        for own in told.events:
            self.tracer.emit(
                Reported, engine=name, its_step=told.step, what=own.kind, rids=own.rids, said=own.said, facts=own.facts
            )

    def _take_tokens(self, name: str, message: Tokens) -> Req | None:
        attempt = self.attempts.get(message.room)
        if attempt is None or attempt.decode != name or attempt.req.to_finish is not None:
            return None
        req = attempt.req
        if message.first + len(message.token_ids) == len(req.output_ids):
            return req  # they were taken already
        if message.first != len(req.output_ids) or len(message.logprobs) != len(message.token_ids):
            there = len(req.output_ids)
            self._retry(
                attempt, TransferError(f"engine {name!r} brings tokens from {message.first} on; {there} are there")
            )
            return None
        if not req.output_ids:
            req.cached_tokens = message.cached_tokens
        req.num_draft_tokens, req.num_accepted_tokens = message.num_draft_tokens, message.num_accepted_tokens
        sampled = SampledTokens(message.token_ids, message.logprobs, message.prompt_logprobs)
        self.updater.commit(req, sampled, num_new_kv=0)
        return req

    def _hear_of_end(self, name: str, message: Ended) -> None:
        """An engine is done with a room."""
        if name in self.members:
            self.members[name].rooms.discard(message.room)
        attempt = self.attempts.get(message.room)
        if attempt is None or attempt.req.to_finish is not None:
            return
        if message.fault is None:
            if name == attempt.decode:  # it thinks that the answer is over, and it is not
                self._retry(attempt, TransferError(f"engine {name!r} has ended the request too early"))
            return
        error = error_of(message.fault, name)
        if message.may_retry:
            self._retry(attempt, error)
        else:
            self.finish_requests([attempt.req.rid], FinishError(error))

    # --- inside: engines ----------------------------------------------------------------------------------------------

    def refuse(self, name: str, role: Role, why: str) -> None:
        """Let an engine know why it does not fit."""
        self.refused[role] = f"{name} was refused: {why}"
        self.tracer.emit(EngineRefused, name=name, role=role, why=why)
        self.links.refuse(name, why)

    def _join(self, name: str, joined: Joined) -> None:
        """An engine is ready: it is one of them from now on, or is told why it does not fit."""
        if (why := misfit(joined, self.members.values(), self.vocabulary)) is not None:
            self.refuse(name, joined.role, why)
            return
        self.members.setdefault(name, Member(name, joined, time.monotonic()))
        self.tracer.emit(EngineJoined.of, name, joined)
        if self.weights is not None:  # no request overtakes this
            self.send(name, Call(ON_JOINING, "update_weights", self.weights))

    def lose(self, name: str, why: str) -> None:
        """An engine is gone."""
        self.length.waiting.pop(name, None)
        self.links.drop(name, why)
        if name in self.members:
            self._part(self.members.pop(name), why)

    def _part(self, member: Member, why: str) -> None:
        """Retry the requests of a lost engine on others, and inform the others."""
        name = member.name
        lost = [a for a in self.attempts.values() if name in (a.prefill, a.decode) and a.room in member.rooms]
        self.tracer.emit(EngineLost.of, name, why, lost)
        for other in list(self.members):
            self.send(other, PeerLost(name))
        for attempt in lost:
            self._retry(attempt, EngineLostError(f"engine {name!r} is lost: {why}"))

    def _lose_silent(self, now: float) -> None:
        """Lose engines that hang in a step and could not end themselves."""
        limit_s = self.config.step_timeout_s + WATCHDOG_GRACE_S
        for member in [m for m in self.members.values() if m.rooms and now - m.last_heard > limit_s]:
            self.lose(member.name, f"it has said nothing for {limit_s:g} s")

    def send(self, name: str, message: ToEngine) -> None:
        """To an engine; one that is gone is lost then."""
        try:
            self.links.send(name, message)
        except PeerLostError as error:
            self.lose(name, str(error))

    # --- inside: requests ---------------------------------------------------------------------------------------------

    def _route(self, req: Req) -> None:
        """Give a request a room and two engines, or its end if there are none."""
        chosen = [min(self.of_role(role), key=load_of, default=None) for role in ("prefill", "decode")]
        for role, found in zip(("prefill", "decode"), chosen, strict=True):
            if found is None:
                if not self.links.coming(role):
                    self.finish_requests([req.rid], FinishError(EngineLostError(f"there is no {role} engine left")))
                return
        prefill, decode = chosen
        assert prefill is not None and decode is not None
        room, self._next_room = self._next_room, self._next_room + 1
        job = job_of(req, speculate=self.speculates and req.speculate)
        attempt = Attempt(room, req, prefill.name, decode.name, self.num_attempts.get(req.rid, 0) + 1)
        self.attempts[room] = attempt
        self._room_of[req.rid] = room
        for member in (prefill, decode):
            if not member.rooms:  # without requests it had nothing to say
                member.last_heard = time.monotonic()
            member.rooms.add(room)
        req.status = RequestStatus.RUNNING
        self.tracer.emit(
            RequestRouted,
            rid=req.rid,
            room=room,
            prefill=prefill.name,
            decode=decode.name,
            attempt=attempt.number,
            num_output_tokens=len(req.output_ids),
        )
        try:
            self.send(decode.name, Decode(room, job, prefill.name))
            if room in self.attempts:  # else the decode engine has turned out to be gone
                self.send(prefill.name, Prefill(room, job, decode.name))
        except WireError as error:
            self.finish_requests([req.rid], FinishError(error))

    def _retry(self, attempt: Attempt, error: EngineError) -> None:
        """The attempt has failed. Another one, or the request's end."""
        self._give_up(attempt)
        if attempt.req.to_finish is not None or self.num_attempts.get(attempt.req.rid) == attempt.number:
            return  # meanwhile its other engine has turned out to be gone, too
        self.num_attempts[attempt.req.rid] = attempt.number
        if attempt.number > self.config.max_retries:
            self.finish_requests([attempt.req.rid], FinishError(error))
            return
        self.num_retries += 1
        attempt.req.status = RequestStatus.PREEMPTED

    def _give_up(self, attempt: Attempt) -> None:
        """Nothing more is wanted of this room."""
        for name in (attempt.prefill, attempt.decode):
            member = self.members.get(name)
            if member is not None and attempt.room in member.rooms:
                self.send(name, Cancel(attempt.room))
                member.rooms.discard(attempt.room)
        self.attempts.pop(attempt.room, None)

    def _marked(self) -> list[Req]:
        """Those that are to end."""
        return [req for req in self.requests.values() if req.to_finish is not None]

    def _finish(self, req: Req) -> None:
        assert req.to_finish is not None
        attempt = self.attempts.get(self._room_of.get(req.rid, -1))
        if attempt is not None:
            self._give_up(attempt)
        self._room_of.pop(req.rid, None)
        self.num_attempts.pop(req.rid, None)
        del self.requests[req.rid]
        self.updater.end(req, req.to_finish)
