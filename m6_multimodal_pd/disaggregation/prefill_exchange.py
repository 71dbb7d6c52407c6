"""Whose requests a prefill engine knows and does not run: those without a place elsewhere, and those that go there.

A prompt is not computed before the decode side has room for its KV (`bootstrap_queue`); and when it is computed, with
its first token, its KV stays until the decode side has all of it (`inflight_queue`). In between the request waits and
runs like any other. New in this milestone. SGLang: `PrefillBootstrapQueue` and `disagg_prefill_inflight_queue` in
`disaggregation/prefill.py`.
"""

from typing import Any

from m4_radix_cache.request import Req
from m6_multimodal_pd.disaggregation.first_token import HANDED_ON


class PrefillExchange:
    """An `Exchange`: with decode engines, from the side that computes prompts."""

    def __init__(self) -> None:
        self.bootstrap_queue: dict[str, Req] = {}
        """By request id: the decode side has not said yet that there is room."""
        self.inflight_queue: dict[str, Req] = {}
        """By request id: computed, and on its way."""

    def held(self) -> list[Req]:
        return [*self.bootstrap_queue.values(), *self.inflight_queue.values()]

    def holds(self, req: Req) -> bool:
        return req.rid in self.inflight_queue or req.rid in self.bootstrap_queue

    def takes_in(self, req: Req) -> bool:
        """Everybody waits for room elsewhere first."""
        self.bootstrap_queue[req.rid] = req
        return True

    def keeps(self, req: Req) -> bool:
        """Whoever has its first token is on its way; it ends when all of its KV is there."""
        if req.to_finish is not HANDED_ON or req.rid in self.inflight_queue:
            return False
        req.to_finish = None
        self.inflight_queue[req.rid] = req
        return True

    def arrived(self) -> Any:
        """Nobody comes to this side."""
        return None

    def let_go(self, req: Req) -> None:
        self.bootstrap_queue.pop(req.rid, None)
        self.inflight_queue.pop(req.rid, None)

    def may_run(self, rid: str) -> Req | None:
        """There is room elsewhere for this request, so it may wait for its turn here. None if that was known."""
        return self.bootstrap_queue.pop(rid, None)
