"""Router of a group: choose a prefill and a decode engine for each request, and retry requests of lost engines.

The engine core above uses the router as a scheduler: requests come in, and each step returns those that changed. The
router gives each attempt at a request a room, a number that is never used again, and sends it to a prefill and a decode
engine. Tokens come back as ids; the router's stop checker is of the same class as the engines', so that both sides end
a request at the same token. If an engine is lost or a transfer fails, the request gets another room and continues after
the tokens that it has: a draw depends on seed and position alone, so the next tokens are the same (but where a draft
model draws its drafts, they are another sample from the same distribution). New in this milestone. SGLang:
`disaggregation/mini_lb.py` (now the router of its own package); vLLM: a proxy in front of two servers.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from m1_single_request.errors import EngineError
from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig, Role
from m6_multimodal_pd.disaggregation.events import EngineJoined, EngineLost, EngineRefused, Reported, RequestRouted
from m6_multimodal_pd.disaggregation.members import Member, incompatibility, length_incompatibility, load_of
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of, job_of
from m6_multimodal_pd.disaggregation.runtime.links import Links
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Answer,
    Call,
    Cancel,
    Decode,
    Ended,
    Generate,
    Joined,
    LengthFitted,
    LengthFixed,
    PeerLost,
    Prefill,
    Relay,
    StepEvents,
    ToEngine,
    Tokens,
    ToRouter,
)
from m6_multimodal_pd.errors import EngineLostError, PeerLostError, TransferError, WireError
from m6_multimodal_pd.request import Req

ON_JOINING = 0
"""Number of the call that an engine receives when it joins."""
WATCHDOG_GRACE_S = 30.0
"""An engine's watchdog must have ended it this many seconds after `step_timeout_s`."""


@dataclass(eq=False)
class Attempt:
    """An attempt at a request: a room and its two engines, or one that is both."""

    room: int
    req: Req
    prefill: str
    decode: str
    number: int
    """1 for the first."""
    drafts_before: tuple[int, int]
    """Drafts of earlier attempts: their number, and the number of accepted ones."""


class Router:
    """Routes requests to engines and returns those that changed. Belongs to one thread.

    It takes requests once `fix_length` was called.
    """

    updater: RequestUpdater

    def __init__(self, *, links: Links, config: DisaggregationConfig, vocabulary: str, tracer: Tracer) -> None:
        """`vocabulary`: of the tokenizer that makes texts here (see `vocabulary_of`)."""
        self.links, self.config, self.vocabulary, self.tracer = links, config, vocabulary, tracer
        self.requests: dict[str, Req] = {}
        self.attempts: dict[int, Attempt] = {}
        """Attempts in progress, by room."""
        self.latest: dict[str, Attempt] = {}
        """The latest attempt at each request, in progress or failed, by request id."""
        self.members: dict[str, Member] = {}
        self.fitted: dict[str, LengthFitted] = {}
        """Engines that wait until `max_model_len` is fixed, by name."""
        self.max_model_len: int | None = None
        """In tokens, prompt and output together; None until it is fixed."""
        self.refused: dict[Role, str] = {}
        """Name and reason of the last engine of each role that was rejected."""
        self.weights: str | None = None
        """The model that replaced the first one; an engine that joins must load it."""
        self._rooms = count()
        self._changed: dict[str, Req] = {}

    # --- the scheduler's part, for the engine core --------------------------------------------------------------------

    @property
    def running(self) -> list[Req]:
        """Requests that two engines have."""
        return [attempt.req for attempt in self.attempts.values()]

    @property
    def waiting(self) -> list[Req]:
        """Requests that are to be routed, for the first time or again."""
        running = {req.rid for req in self.running}
        return [req for rid, req in self.requests.items() if rid not in running]

    def add_request(self, request: Req) -> None:
        """Queue a request; the next update routes it."""
        self.tracer.emit(lambda: RequestAdded.of(request, len(self.waiting)))  # counted for a reader alone
        if request.multimodal_inputs is not None:
            request.multimodal_inputs.trace_arrival(request.rid, self.tracer)
        self.requests[request.rid] = request

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark requests to end with the next update. Returns the ids that were marked."""
        known = {rid: self.requests[rid] for rid in request_ids if rid in self.requests}
        return [rid for rid, req in known.items() if self.updater.mark(req, reason)]

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step, and cancel their rooms."""
        requests, self.requests = self.requests, {}
        for attempt in list(self.attempts.values()):
            self._give_up(attempt)
        self.latest.clear()
        self._changed.clear()
        for req in requests.values():
            self.updater.end(req, reason)

    # --- a step -------------------------------------------------------------------------------------------------------

    def update(self, timeout_s: float) -> list[Req]:
        """Route waiting requests, receive messages, end marked requests. Returns the requests that changed."""
        for req in self.waiting:
            if req.to_finish is None:
                self._route(req)
        self.listen(0.0 if self._marked() else timeout_s)
        marked = self._marked()
        changed, self._changed = self._changed | {req.rid: req for req in marked}, {}
        for req in marked:
            self._finish(req)
        return list(changed.values())

    def listen(self, timeout_s: float) -> None:
        """Receive messages, and lose the engines that are gone. Waits `timeout_s` at most for the first message."""
        self.receive(timeout_s)
        for lost in self.links.lost():
            self.lose(lost.name, lost.why)
        if self.config.transport != "in_process":
            self._lose_silent(time.monotonic())

    def receive(self, timeout_s: float) -> None:
        """Receive messages. Waits `timeout_s` at most for the first one."""
        for name, message in self.links.receive(timeout_s):
            try:
                self._handle(name, message)
            except Exception as error:  # the messages of other engines are handled all the same
                self.lose(name, f"the router failed at its message: {error!r}")

    # --- inside: messages ---------------------------------------------------------------------------------------------

    def _handle(self, name: str, message: ToRouter) -> None:
        if isinstance(message, Joined):
            return self._join(name, message)
        if isinstance(message, LengthFitted):
            return self._answer_length(name, message)
        member = self.members.get(name)
        if member is None:
            return None
        member.last_heard = time.monotonic()
        match message:
            case StepEvents():
                self._pass_on(name, message)
            case Relay():
                self._relay(name, message)
            case Answer():
                self._take_answer(member, message)
            case Tokens():
                self._take_tokens(name, message)
            case Ended():
                self._take_end(member, message)

    def _pass_on(self, name: str, sent: StepEvents) -> None:
        """Emit the events of an engine's trace in the trace of this process."""
        for own in sent.events:
            self.tracer.emit(
                Reported, engine=name, its_step=sent.step, what=own.kind, rids=own.rids, text=own.text, facts=own.facts
            )

    def _relay(self, name: str, message: Relay) -> None:
        """Pass a message on. One that is too large with its new envelope fails its request, and no engine."""
        try:
            self.send(message.peer, Relay(name, message.body))
        except WireError as error:
            attempt = self.attempts.get(getattr(message.body, "room", -1))
            if attempt is not None:
                self.finish_requests([attempt.req.rid], FinishError(error))

    def _take_answer(self, member: Member, answer: Answer) -> None:
        """Store the answer to a call, also one that arrives late. An engine that cannot load the weights is lost."""
        if answer.number in member.calls:
            member.answers[member.calls.pop(answer.number)] = answer
        elif answer.number == ON_JOINING and answer.fault is not None:
            self.lose(member.name, f"it cannot load {self.weights}: {answer.fault.text}")

    def _take_tokens(self, name: str, message: Tokens) -> None:
        """Append tokens to their request; a gap before them fails the attempt."""
        attempt = self.attempts.get(message.room)
        if attempt is None or attempt.decode != name or attempt.req.to_finish is not None:
            return
        req = attempt.req
        num_tokens = len(req.output_ids)
        if message.first != num_tokens or len(message.logprobs) != len(message.token_ids):
            text = f"engine {name!r} sends tokens from {message.first} on; the request has {num_tokens}"
            self._retry(attempt, TransferError(text))
            return
        if not req.output_ids:
            req.cached_tokens = message.cached_tokens
        num_draft_tokens, num_accepted_tokens = attempt.drafts_before
        req.num_draft_tokens = num_draft_tokens + message.num_draft_tokens
        req.num_accepted_tokens = num_accepted_tokens + message.num_accepted_tokens
        sampled = SampledTokens(message.token_ids, message.logprobs, message.prompt_logprobs)
        self.updater.commit(req, sampled, num_new_kv=0)
        self._changed[req.rid] = req

    def _take_end(self, member: Member, message: Ended) -> None:
        """Free an engine's room. If the request has not ended here, retry it, or mark it to end with the error."""
        member.rooms.discard(message.room)
        attempt = self.attempts.get(message.room)
        if attempt is None or attempt.req.to_finish is not None:
            return
        if message.fault is None:
            if member.name == attempt.decode:
                self._retry(attempt, TransferError(f"engine {member.name!r} has ended the request too early"))
            return
        error = error_of(message.fault, member.name)
        if message.may_retry:
            self._retry(attempt, error)
        else:
            self.finish_requests([attempt.req.rid], FinishError(error))

    # --- inside: engines ----------------------------------------------------------------------------------------------

    def fix_length(self, max_model_len: int, stop_checker: StopChecker) -> None:
        """Fix the length of requests in tokens, and send it to the engines that wait for it."""
        self.max_model_len = max_model_len
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=self.tracer)
        fitted, self.fitted = self.fitted, {}
        for name, own in fitted.items():
            self._answer_length(name, own)

    def _answer_length(self, name: str, fitted: LengthFitted) -> None:
        """Send `max_model_len` to an engine, or reject the engine; let it wait until the length is fixed."""
        if self.max_model_len is None:
            self.fitted[name] = fitted
        elif (why := length_incompatibility(fitted, self.max_model_len)) is None:
            self.send(name, LengthFixed(self.max_model_len))
        else:
            self._refuse(name, fitted.role, why)

    def _join(self, name: str, joined: Joined) -> None:
        """Make an engine a member, or reject it."""
        if (why := incompatibility(joined, self.members.values(), self.vocabulary)) is not None:
            self._refuse(name, joined.role, why)
            return
        self.members[name] = Member(name, joined, time.monotonic())
        self.tracer.emit(EngineJoined.of, name, joined)
        if self.weights is not None:  # before any request
            self.send(name, Call(ON_JOINING, "update_weights", self.weights))

    def _refuse(self, name: str, role: Role, why: str) -> None:
        self.refused[role] = f"{name} was refused: {why}"
        self.tracer.emit(EngineRefused, name=name, role=role, why=why)
        self.links.refuse(name, why)

    def lose(self, name: str, why: str) -> None:
        """Drop an engine, inform the others, and retry its requests on them."""
        self.fitted.pop(name, None)
        self.links.drop(name, why)
        member = self.members.pop(name, None)
        if member is None:
            return
        member.is_lost = True
        lost = [self.attempts[room] for room in sorted(member.rooms) if room in self.attempts]
        self.tracer.emit(EngineLost, name=name, why=why, rids=tuple(attempt.req.rid for attempt in lost))
        for other in list(self.members):
            self.send(other, PeerLost(name))
        for attempt in lost:
            self._retry(attempt, EngineLostError(f"engine {name!r} is lost: {why}"))

    def _lose_silent(self, now: float) -> None:
        """Lose engines that hang in a step and whose watchdog did not end them."""
        limit_s = self.config.step_timeout_s + WATCHDOG_GRACE_S
        for member in [m for m in self.members.values() if m.rooms and now - m.last_heard > limit_s]:
            self.lose(member.name, f"it has sent nothing for {limit_s:g} s")

    def send(self, name: str, message: ToEngine) -> None:
        """Send to an engine; lose it if it is gone. Raises `WireError` for a message that is too large."""
        try:
            self.links.send(name, message)
        except PeerLostError as error:
            self.lose(name, str(error))

    # --- inside: requests ---------------------------------------------------------------------------------------------

    def _route(self, req: Req) -> None:
        """Give a request a room and two engines, if possible others than those of its last attempt: either may be the
        cause, and that counts more than a prefix that it may have cached. Without an engine the request waits, or
        ends if none will join."""
        earlier = self.latest.get(req.rid)
        tried = () if earlier is None else (earlier.prefill, earlier.decode)
        prefill, decode = (
            min(self.of_role(role), key=lambda member: (member.name in tried, *load_of(member)), default=None)
            for role in (("both", "both") if self.config.both else ("prefill", "decode"))
        )
        if prefill is None or decode is None:
            role = "both" if self.config.both else "prefill" if prefill is None else "decode"
            if not self.links.coming(role):
                self.finish_requests([req.rid], FinishError(EngineLostError(f"there is no {role} engine left")))
            return
        number = 1 if earlier is None else earlier.number + 1
        drafts = req.num_draft_tokens, req.num_accepted_tokens
        attempt = Attempt(next(self._rooms), req, prefill.name, decode.name, number, drafts)
        self.attempts[attempt.room] = self.latest[req.rid] = attempt
        for member in (prefill, decode):
            if not member.rooms:  # without requests it had nothing to send
                member.last_heard = time.monotonic()
            member.rooms.add(attempt.room)
        req.status = RequestStatus.RUNNING
        self.tracer.emit(
            RequestRouted,
            rid=req.rid,
            room=attempt.room,
            prefill=prefill.name,
            decode=decode.name,
            attempt=number,
            num_output_tokens=len(req.output_ids),
        )
        self._send_job(attempt)

    def _send_job(self, attempt: Attempt) -> None:
        """Send a request to its two engines; mark it to end if no message holds it."""
        room, job = attempt.room, job_of(attempt.req)
        try:
            if self.config.both:
                return self.send(attempt.decode, Generate(room, job))
            self.send(attempt.decode, Decode(room, job, attempt.prefill))
            if room in self.attempts:  # else the decode engine was found to be gone
                self.send(attempt.prefill, Prefill(room, job, attempt.decode))
        except WireError as error:
            self.finish_requests([attempt.req.rid], FinishError(error))

    def of_role(self, role: Role) -> list[Member]:
        """Return the engines of a role."""
        return [member for member in self.members.values() if member.role == role]

    def _retry(self, attempt: Attempt, error: EngineError) -> None:
        """Give up a failed attempt. Its request is among the `waiting` ones again, which the next update routes, or
        ends with `error` after the last retry."""
        if attempt.room not in self.attempts:
            return  # it was given up when its other engine was lost
        self._give_up(attempt)
        if attempt.req.to_finish is not None:
            return
        if attempt.number > self.config.max_retries:
            self.finish_requests([attempt.req.rid], FinishError(error))
        else:
            attempt.req.status = RequestStatus.PREEMPTED

    def _give_up(self, attempt: Attempt) -> None:
        """End an attempt and cancel its room on the engines that have not ended it."""
        self.attempts.pop(attempt.room, None)
        for name in (attempt.prefill, attempt.decode):
            member = self.members.get(name)
            if member is not None and attempt.room in member.rooms:
                member.rooms.discard(attempt.room)
                self.send(name, Cancel(attempt.room))

    def _marked(self) -> list[Req]:
        return [req for req in self.requests.values() if req.to_finish is not None]

    def _finish(self, req: Req) -> None:
        assert req.to_finish is not None
        attempt = self.latest.pop(req.rid, None)
        if attempt is not None:
            self._give_up(attempt)
        del self.requests[req.rid]
        self.updater.end(req, req.to_finish)
