"""Build the router's choice of m6: which prefill engine and which decode engine get a request.

A group has several engines of each role. They join and are lost at any time, and each has its own requests. A router
that takes them in turn gives work to an engine that is full, while another one has nothing to do. If an attempt at a
request fails, either of its engines may be the cause, so the next attempt should have others; but if there are no
others, the same engine is better than none. And if an engine is missing, the request must neither wait for ever nor
give up too early.

Explained in docs/m6_failures.md#2-failures-how-each-is-detected.

    cp starters/router_choice.py my_router.py
    pytest --part router_choice=my_router.py:my_route

Read first what a router is: docs/m6_two_engines.md, "RouterCore and Router". Then what it does if an engine fails:
docs/m6_failures.md, section 2.
"""

import time
from typing import Any

from m1_single_request.request import RequestStatus
from m6_multimodal_pd.disaggregation.events import RequestRouted
from m6_multimodal_pd.disaggregation.members import Member
from m6_multimodal_pd.disaggregation.router import Attempt, Router
from m6_multimodal_pd.request import Req


def my_route(self: Router, req: Req) -> None:
    """Choose the engines of a request that waits, and begin an attempt on them.

    It takes the place of a method of `Router`, so `self` is the router. In every step the router calls it for each
    request that has no engines: for new ones, and for those whose last attempt has failed.

    A request needs two engines, one of the role `prefill` and one of the role `decode`. With `self.config.both` it
    needs one of the role `both`, which is then both of the two. `self.of_role(role)` returns the engines of a role that
    are there, each a `Member`: `member.name`, and `member.rooms`, the set of rooms, one for each request that it has.

    Choose of each role, in this order:

    1. an engine that the latest attempt at this request did not have, neither as its prefill engine nor as its decode
       engine, if there is one. `self.latest.get(req.rid)` is that attempt, with the names `prefill` and `decode` of
       its engines; None for a new request. Attempts before the latest one do not count;
    2. the engine with the fewest rooms;
    3. the engine whose name is smaller, compared as a text.

    With both engines, call `begin_attempt(self, req, prefill, decode)`. Without an engine of a needed role do not begin
    an attempt. If both roles are missing, look at one of them only: both answers are right.

    - If `self.links.coming(role)` is true for the missing role, one will join: do nothing. The request is asked for
      again in the next step.
    - If it is false, end the request with an error, `EngineLostError("why")` of `m6_multimodal_pd.errors`:
      `self.finish_requests([req.rid], FinishError(error))`, with `FinishError` of `m1_single_request.request`. Raise
      nothing, because other requests can go on.
    """
    raise NotImplementedError


def begin_attempt(router: Any, req: Req, prefill: Member, decode: Member) -> None:
    """Given: give a request a room, which its engines have from now on, and send it to them."""
    earlier = router.latest.get(req.rid)
    number = 1 if earlier is None else earlier.number + 1
    drafts = req.num_draft_tokens, req.num_accepted_tokens
    attempt = Attempt(next(router._rooms), req, prefill.name, decode.name, number, drafts)
    router.attempts[attempt.room] = router.latest[req.rid] = attempt
    for member in (prefill, decode):
        if not member.rooms:
            member.last_heard = time.monotonic()
        member.rooms.add(attempt.room)
    req.status = RequestStatus.RUNNING
    router.tracer.emit(
        RequestRouted,
        rid=req.rid,
        room=attempt.room,
        prefill=prefill.name,
        decode=decode.name,
        attempt=number,
        num_output_tokens=len(req.output_ids),
    )
    router._send_job(attempt)
