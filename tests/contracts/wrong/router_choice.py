"""Typical mistakes in the router's choice, each with the hint that it must get."""

from collections.abc import Callable
from functools import partial
from typing import Any

from m1_single_request.request import FinishError
from m6_multimodal_pd.disaggregation.members import Member, load_of
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.request import Req

right = partial(Router._route)  # the engine's own, also while a mistake is in its place


def from_these(router: Any, req: Req, choose: Callable[[list[Member]], list[Member]]) -> None:
    """Route a request as if there were only the engines of a role that `choose` returns."""
    all_of_role = router.of_role
    router.of_role = lambda role: choose(all_of_role(role))
    try:
        right(router, req)
    finally:
        del router.of_role


def in_turn(self: Router, req: Req) -> None:
    """Engines are chosen in turn, whatever they have to do."""
    number = int(req.rid[1:]) if req.rid[1:].isdigit() else 0
    from_these(self, req, lambda members: sorted(members, key=lambda m: m.name)[number % max(len(members), 1) :][:1])


def the_first(self: Router, req: Req) -> None:
    """The first engine gets everything."""
    from_these(self, req, lambda members: sorted(members, key=lambda m: m.name)[:1])


def by_joining(self: Router, req: Req) -> None:
    """Of equal engines the one that joined first is chosen."""
    from_these(self, req, lambda members: sorted(members, key=lambda m: len(m.rooms))[:1])


def the_same_again(self: Router, req: Req) -> None:
    """A request that failed is routed like a new one."""
    from_these(self, req, lambda members: sorted(members, key=load_of)[:1])


def never_again(self: Router, req: Req) -> None:
    """An engine of the last attempt does not get the request again, even if there is no other one."""
    latest = self.latest.get(req.rid)
    tried = () if latest is None else (latest.prefill, latest.decode)
    from_these(self, req, lambda members: [member for member in members if member.name not in tried])


def all_attempts_count(self: Any, req: Req) -> None:
    """Engines of all earlier attempts are avoided."""
    self.tried = getattr(self, "tried", {})
    tried = self.tried.setdefault(req.rid, set())
    from_these(self, req, lambda members: [m for m in members if m.name not in tried] or members)
    latest = self.latest.get(req.rid)
    tried |= set() if latest is None else {latest.prefill, latest.decode}


def waits_for_ever(self: Router, req: Req) -> None:
    """A request waits, also for an engine that will never join."""
    roles = ("both",) if self.config.both else ("prefill", "decode")
    if all(self.of_role(role) for role in roles):  # type: ignore[arg-type]
        right(self, req)


def gives_up(self: Router, req: Req) -> None:
    """A request ends as soon as an engine is missing."""
    roles = ("both",) if self.config.both else ("prefill", "decode")
    if all(self.of_role(role) for role in roles):  # type: ignore[arg-type]
        right(self, req)
    else:
        self.finish_requests([req.rid], FinishError(EngineLostError("an engine is missing")))


def raises(self: Router, req: Req) -> None:
    """The error is raised, so that it would end the step of all requests."""
    roles = ("both",) if self.config.both else ("prefill", "decode")
    for role in roles:
        if not self.of_role(role) and not self.links.coming(role):  # type: ignore[arg-type]
            raise EngineLostError(f"there is no {role} engine left")
    right(self, req)


WRONG = [
    (in_turn, "Engines are not chosen in turn"),
    (the_first, "The fewest rooms are the least work"),
    (by_joining, "so the name decides"),
    (the_same_again, "Either engine may be the cause"),
    (never_again, "got:      ('it waits', 'it waits')\nhint:     A used engine comes after all others"),
    (all_attempts_count, "has the latest attempt alone"),
    (waits_for_ever, "end the request with an error"),
    (gives_up, "An engine will join"),
    (raises, "ends one request, and the others go on"),
]
