"""Contract of the router's choice in m6: which engines of a group get a request, and which get it again."""

from collections.abc import Sequence
from random import Random
from typing import Any

from m1_single_request.request import FinishAbort
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m6_multimodal_pd import EngineLostError, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.runtime.messages import Decode, Ended, Fault, Generate, Joined, Prefill
from tests.contracts.part import Broken, Part, same
from tests.m6_multimodal_pd.items import make_req
from tests.m6_multimodal_pd.shipped import MANY_TOKENS, PROMPTS, answers, stepped, text_group

PART = Part(
    name="router_choice",
    target="m6_multimodal_pd.disaggregation.router:Router._route",
    lesson="docs/m6_failures.md#2-failures-how-each-is-detected",
    starter="my_route",
)

LENGTH = 1024
VOCABULARY = "0" * 64
WAITS, ENDED = "it waits", "it has ended"
ROLES = ("prefill", "decode")


class Links:
    """Messages to engines that are names only."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.arrived: list[tuple[str, Any]] = []
        self.will_join: set[str] = set(ROLES) | {"both"}

    def send(self, name: str, message: Any) -> None:
        self.sent.append((name, message))

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def lost(self) -> list[Any]:
        return []

    def drop(self, name: str, why: str) -> None:
        """The router has given an engine up."""

    def coming(self, role: str) -> bool:
        return role in self.will_join


class Site:
    """A router with this choice, what was done with it, and the engines that its requests got."""

    def __init__(self, part: Any, **engines: int) -> None:
        class Choosing(Router):
            def _route(self, req: Any) -> None:
                try:
                    part(self, req)
                except EngineLostError as error:
                    on, got = f"{site.on}: the choice for {req.rid}", f"EngineLostError({str(error)!r}) is raised"
                    hint = "Raise nothing: `self.finish_requests([req.rid], FinishError(error))` ends one request, and "
                    raise Broken(on, "no error", got, f"{hint}the others go on.") from error

        site = self
        config = DisaggregationConfig(transport="in_process", max_retries=1000, **engines)
        self.links, self.done, self.num_asked = Links(), list[str](), 0
        links: Any = self.links
        self.router = Choosing(links=links, config=config, vocabulary=VOCABULARY, tracer=Tracer())
        self.router.fix_length(LENGTH, StopChecker(eos_token_ids=(), max_model_len=LENGTH))

    @property
    def on(self) -> str:
        """What was done, the last of it."""
        shown = self.done[-7:]
        return f"{'...; ' * (len(shown) < len(self.done))}{'; '.join(shown)}"

    def join(self, *names: str) -> None:
        """Engines join, in this order. The role is the beginning of a name."""
        for name in names:
            role: Any = name.partition("-")[0]
            self.links.arrived.append((name, Joined(role, 16, LENGTH, LENGTH, "float32[2, 16]", "tiny", VOCABULARY)))
        self.done.append(f"{', '.join(names)} join{'s' * (len(names) == 1)}")
        self.router.receive(0.0)
        self.router.update(0.0)

    def ask(self, times: int = 1) -> str:
        """New requests come: r0, r1, ...; the id of the last one."""
        for _ in range(times):
            rid = f"r{self.num_asked}"
            self.router.add_request(make_req(self.num_asked, [5, 6, 7]))
            self.num_asked += 1
            self.done.append(f"{rid} comes")
            self.router.update(0.0)
        return rid

    def end(self, rid: str) -> None:
        """A request ends, and leaves its engines."""
        self.done.append(f"{rid} ends")
        self.router.finish_requests([rid], FinishAbort())
        self.router.update(0.0)

    def fail(self, rid: str) -> None:
        """The transfer of a request fails: it is routed again."""
        self.done.append(f"{rid} fails")
        room = max(room for _, message in self.links.sent if (room := room_of(message, rid)) is not None)
        name = self.engines_of(rid)[1]
        self.links.arrived.append((name, Ended(room, Fault("TransferError", "a test"), may_retry=True)))
        self.router.update(0.0)
        self.router.update(0.0)

    def lose(self, name: str) -> None:
        """An engine is lost: its requests are routed again."""
        self.done.append(f"{name} is lost")
        self.router.lose(name, "a test")
        self.router.update(0.0)

    def engines_of(self, rid: str) -> tuple[str, str]:
        """The engines that a request has, for its prefill and its decode. If it waits, none, or those that it should
        not have been sent to: one without the other."""
        if rid not in self.router.requests:
            return ENDED, ENDED
        found: dict[int, dict[str, str]] = {}
        for name, message in self.links.sent:
            if (room := room_of(message, rid)) is not None:
                for role in ROLES if isinstance(message, Generate) else (type(message).__name__.lower(),):
                    found.setdefault(room, {})[role] = name
        latest = found[max(found)] if found else {}
        if len(latest) == 2 and any(req.rid == rid for req in self.router.waiting):
            return WAITS, WAITS
        return latest.get("prefill", WAITS), latest.get("decode", WAITS)

    def check(self, rid: str, prefill: str, decode: str, hint: str = "") -> None:
        """Compare the engines of a request."""
        on = f"{self.on}: the engines of {rid} for prefill and decode"
        same(self.engines_of(rid), (prefill, decode), on=on, hint=hint)


def room_of(message: Any, rid: str) -> int | None:
    """The room of a message that brings a request to an engine."""
    if isinstance(message, Prefill | Decode | Generate) and message.job.rid == rid:
        return message.room
    return None


def site_of(part: Any, *names: str, **engines: int) -> Site:
    """A group of these engines."""
    site = Site(part, **engines)
    site.join(*names)
    return site


def test_a_request_gets_an_engine_of_each_role(part: Any) -> None:
    """A request is sent to a prefill engine and to a decode engine, each of which knows the other one."""
    site = site_of(part, "decode-0", "prefill-0")
    rid = site.ask()
    site.check(rid, "prefill-0", "decode-0", "Choose from `self.of_role(role)`, and give both to `begin_attempt`.")
    peers = {name: message.peer for name, message in site.links.sent if isinstance(message, Prefill | Decode)}
    wanted = {"prefill-0": "decode-0", "decode-0": "prefill-0"}
    hint = "Of the two engines that `begin_attempt` takes, the prefill engine comes first."
    same(peers, wanted, on=f"{site.on}: the peer that each engine is told", hint=hint)


def test_the_engine_with_the_fewest_requests_is_chosen(part: Any) -> None:
    """Of the engines of a role the one with the fewest requests is chosen, of each role for itself."""
    site = site_of(part, "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", prefill=2, decode=3)
    hint = "`member.rooms` has a room for every request that an engine has now. The fewest rooms are the least work."
    for prefill, decode in ((0, 0), (1, 1), (0, 2), (1, 0)):
        site.check(site.ask(), f"prefill-{prefill}", f"decode-{decode}", hint)


def test_equal_engines_are_chosen_by_name(part: Any) -> None:
    """Of engines with equally many requests the one with the smaller name is chosen, in whatever order they joined."""
    site = site_of(part, "prefill-1", "prefill-0", "decode-2", "decode-0", "decode-1", prefill=2, decode=3)
    hint = "All have no request, so the name decides: compared as a text."
    site.check(site.ask(), "prefill-0", "decode-0", hint)


def test_requests_that_have_ended_do_not_count(part: Any) -> None:
    """An engine whose request has ended is chosen before one that is still at work."""
    site = site_of(part, "prefill-0", "prefill-1", "decode-0", "decode-1", prefill=2, decode=2)
    site.ask(3)
    site.end("r0")
    site.end("r2")
    hint = "Engines are not chosen in turn: r0 and r2 have left theirs, so these have nothing to do."
    site.check(site.ask(), "prefill-0", "decode-0", hint)
    site.check(site.ask(), "prefill-0", "decode-0", hint="Both have one request, so the name decides.")


def test_an_engine_may_do_both(part: Any) -> None:
    """In a group of the role `both` one engine gets the request for prefill and decode."""
    site = site_of(part, "both-0", "both-1", both=2)
    hint = "With `self.config.both` the engines have the role `both`, and one of them is both engines of a request."
    for name in ("both-0", "both-1", "both-0"):
        site.check(site.ask(), name, name, hint)


def test_a_request_that_failed_gets_other_engines(part: Any) -> None:
    """A request that is tried again gets other engines than in its last attempt, even if they have more requests."""
    site = site_of(part, "prefill-0", "prefill-1", "decode-0", "decode-1", prefill=2, decode=2)
    site.ask(4)
    site.fail("r0")
    hint = (
        "Either engine may be the cause. So first those that the last attempt did not have, then the fewest requests."
    )
    site.check("r0", "prefill-1", "decode-1", hint)
    site.check(site.ask(), "prefill-0", "decode-0", "Another request has had no attempt: its engines are all new.")


def test_without_other_engines_the_same_is_tried(part: Any) -> None:
    """If there is no other engine of a role, the same one gets the request again."""
    site = site_of(part, "prefill-0", "decode-0", "decode-1", decode=2)
    site.ask()
    site.fail("r0")
    site.check("r0", "prefill-0", "decode-1", "A used engine comes after all others, but it is better than none.")
    alone = site_of(part, "both-0", both=1)
    alone.ask()
    alone.fail("r0")
    rooms = [room for _, message in alone.links.sent if (room := room_of(message, "r0")) is not None]
    same(rooms, [0, 1], on=f"{alone.on}: the rooms of r0", hint="The same engine gets it again, in a room of its own.")


def test_only_the_last_attempt_counts(part: Any) -> None:
    """The engines of attempts before the last one may be chosen again."""
    site = site_of(part, "prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1", prefill=3, decode=2)
    site.ask()
    site.fail("r0")
    site.check("r0", "prefill-1", "decode-1", "First those that the last attempt did not have.")
    site.fail("r0")
    hint = "`self.latest` has the latest attempt alone: prefill-0 is not in it, and so comes before prefill-2."
    site.check("r0", "prefill-0", "decode-0", hint)


def test_it_waits_for_an_engine_that_will_join(part: Any) -> None:
    """Without an engine of a role the request waits if one will join, and nothing is sent."""
    for there, missing in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        site = site_of(part, there)
        rid = site.ask()
        same(rid in site.router.requests, True, on=f"{site.on}: is {rid} still there?", hint="An engine will join.")
        site.check(rid, WAITS, WAITS, "Both engines are chosen, or neither: a request on one of them waits in vain.")
        same(site.router.members[there].rooms, set(), on=f"{site.on}: the rooms of {there}", hint="It waits elsewhere.")
        site.join(missing)
        site.check(rid, "prefill-0", "decode-0", "The next update tries again: nothing needs to be noted.")


def test_it_ends_if_no_engine_will_join(part: Any) -> None:
    """Without an engine of a role, and if none will join, the request ends with `EngineLostError`."""
    for there, role in (("prefill-0", "decode"), ("decode-0", "prefill"), ("", "both")):
        site = site_of(part, there) if there else Site(part, both=1)
        site.links.will_join.discard(role)
        site.done += [f"no {role} engine will join", "r0 comes"]
        site.router.add_request(make_req(0, [5, 6, 7]))
        changed = site.router.update(0.0)
        on = site.on
        hint = "Ask `self.links.coming(role)` for the role that has no engine, and end the request with an error."
        same([req.rid for req in changed], ["r0"], on=f"{on}; who has ended?", hint=hint)
        error = getattr(changed[0].finish_reason, "error", None)
        same(type(error).__name__, EngineLostError.__name__, on=f"{on}; the error", hint=hint)


class Model:
    """Which engines have which requests, in the plainest form."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = roles
        self.has: dict[str, set[str]] = {}
        """By name of an engine: its requests."""
        self.latest: dict[str, tuple[str, ...]] = {}
        self.running: dict[str, tuple[str, ...]] = {}
        self.requests: list[str] = []
        self.why: dict[str, str] = {}
        """What a learner may know about the choice of each request."""

    def route(self) -> None:
        """Route all that wait, in the order in which they came."""
        for rid in self.requests:
            chosen = tuple(self.chosen(rid, role) for role in self.roles)
            if rid in self.running:
                continue
            self.why[rid] = self.told(rid)
            if all(chosen):
                self.running[rid] = self.latest[rid] = chosen
                for name in chosen:
                    self.has[name].add(rid)

    def told(self, rid: str) -> str:
        """What there is before a choice."""
        rooms = ", ".join(f"{name}: {len(has)}" for name, has in sorted(self.has.items()))
        latest = " and ".join(dict.fromkeys(self.latest.get(rid, ())))
        had = f"its latest attempt had {latest}" if latest else "it is a new request"
        return f"When {rid} is routed, {had}, and the engines have these numbers of rooms: {rooms or 'there are none'}."

    def chosen(self, rid: str, role: str) -> str:
        """The engine of a role that a request gets; empty if there is none."""
        names = sorted(name for name in self.has if name.startswith(role))
        others = [name for name in names if name not in self.latest.get(rid, ())]
        fewest = min((len(self.has[name]) for name in others or names), default=0)
        return next((name for name in others or names if len(self.has[name]) == fewest), "")

    def leave(self, rid: str) -> None:
        """A request leaves its engines."""
        for name in self.running.pop(rid, ()):
            if name in self.has:
                self.has[name].discard(rid)

    def lose(self, name: str) -> None:
        for rid in self.has.pop(name):
            self.leave(rid)


def test_it_is_right_after_anything(part: Any) -> None:
    """Whatever joins, comes, ends, fails or is lost: every request has the engines of a model of lists."""
    rng = Random(1)
    for run in range(10):
        roles = ("both",) if run % 3 == 0 else ROLES
        names = [f"{role}-{number}" for role in roles for number in range(3)]
        site, model = Site(part, **dict.fromkeys(roles, 3)), Model(roles)
        for _ in range(25):
            draw, absent = rng.random(), [name for name in names if name not in model.has]
            if draw < 0.2 and absent:
                name = rng.choice(absent)
                model.has[name] = set()
                site.join(name)
            elif draw < 0.3 and model.has:
                name = rng.choice(sorted(model.has))
                model.lose(name)
                site.lose(name)
            elif draw < 0.6 or not model.running:
                model.requests.append(site.ask())
            else:
                rid = rng.choice(sorted(model.running))
                model.leave(rid)
                if draw < 0.8:
                    site.fail(rid)
                else:
                    model.requests.remove(rid)
                    site.end(rid)
            model.route()
            for rid in model.running:
                wanted = model.running[rid]
                site.check(rid, wanted[0], wanted[-1], model.why[rid])
            running = sorted(req.rid for req in site.router.running)
            hint = "A request has engines as soon as there is one of each role, and not before."
            same(running, sorted(model.running), on=f"{site.on}: the requests that have engines", hint=hint)


def test_a_group_answers_although_an_engine_is_lost(part: Any) -> None:
    """A group of one prefill and two decode engines answers as one engine does, also if one is lost in the middle."""
    site_of(part, "prefill-0", "decode-0").ask()  # an error here names its line
    on = f"{len(PROMPTS)} prompts to a group of a prefill engine and two decode engines; decode-0 is lost"
    with text_group(decode=2) as group:
        for prompt in PROMPTS:
            group.add_request(prompt, SamplingParams(max_tokens=MANY_TOKENS))
        last = stepped(group, times=5)
        group.engine_core.router.links.drop("decode-0", "a test")
        last |= stepped(group)
        if group.has_unfinished_requests():
            raise Broken(
                on, "all answers", "a request that has no end", "Every waiting request is routed in each step."
            )
    for output in last.values():
        same(output.error, None, on=f"{on}; the error")
    same(tuple(output.token_ids for output in last.values()), answers(), on=on)
