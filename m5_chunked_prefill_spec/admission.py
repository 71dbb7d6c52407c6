"""Who is let into a step, and with how much of the prompt: the next piece first, then newcomers.

m4's scheduler asked policy and adder itself. There is more to ask now: a prompt that was cut goes on before anybody
else; whoever would only compute again what that prompt is just completing waits for it; and nobody is overtaken for
ever. Nothing is taken here. Whoever is admitted has its prefix locked, and what went wrong is returned, for only the
scheduler ends requests. SGLang: `Scheduler._get_new_batch_prefill_raw`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import Matched
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown
from m4_radix_cache.schedule_batch import Pools
from m4_radix_cache.schedule_policy import SchedulePolicy, order_of
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder

MAX_PASSED_OVER = 32
"""Whoever was overtaken by newcomers in so many steps is not overtaken any more, whatever the policy."""


class Admitted(NamedTuple):
    """What came of a round."""

    reqs: Sequence[Req]
    """Those who run, the one that was in pieces first; of the last one perhaps a piece only."""
    is_full: bool
    """Somebody lacked memory."""
    failures: Mapping[str, Exception]
    """The errors of requests that can never run, by request id."""


class Admission:
    """Asks policy and adder, and remembers who was overtaken."""

    def __init__(
        self,
        *,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        new_token_ratio: NewTokenRatio,
        cuts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        """`cuts`: how prompts may be cut, as keywords of the adder."""
        self.pools, self.policy, self.prefill_adder = pools, policy, prefill_adder
        self.new_token_ratio, self.cuts, self.tracer = new_token_ratio, cuts, tracer
        self.passed_over: dict[str, int] = {}  # by request id: how often newcomers came before it

    def round(
        self,
        chunked: Req | None,
        waiting: Sequence[Req],
        *,
        running: Sequence[Req],
        is_alone: bool,
        num_tokens: int,
        num_places: int,
        has_whole_step: bool,
        bound_by: str,
    ) -> Admitted:
        """Fill at most `num_tokens` and `num_places` with the rest of `chunked` and with `waiting` requests.

        `is_alone`: nobody else holds memory, not even somebody who is about to end and does not run on.
        `has_whole_step`: no request decodes in this step.
        """
        adder = self._new_adder(
            running=running,
            max_prefill_tokens=num_tokens,
            max_new_reqs=num_places + (chunked is not None),
            num_waiting=len(waiting),
            has_whole_step=has_whole_step,
            bound_by=bound_by,
        )
        failures: dict[str, Exception] = {}
        if chunked is not None:
            result = self._add_chunked(adder, chunked)
            if result is AddReqResult.NO_TOKEN and is_alone and not adder.can_run_list:  # no room: never
                failures[chunked.rid] = outgrown(chunked, self.pools)
            if result is not AddReqResult.CONTINUE:
                return Admitted(adder.can_run_list, False, failures)
        is_full = bool(waiting) and self._add_newcomers(adder, waiting, is_alone, failures)
        return Admitted(adder.can_run_list, is_full, failures)

    def started(self, new: Sequence[Req], waiting: Iterable[Req]) -> None:
        """These newcomers run; count whom they have overtaken of those that still wait."""
        newest = max((req.number for req in new), default=0)
        for req in waiting:
            if req.number < newest:
                self.passed_over[req.rid] = self.passed_over.get(req.rid, 0) + 1
        self.forget(req.rid for req in new)

    def forget(self, rids: Iterable[str]) -> None:
        """These requests do not wait any more."""
        for rid in rids:
            self.passed_over.pop(rid, None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_adder(self, **limits: Any) -> PrefillAdder:
        """The part that decides whether another prompt fits into this step."""
        adder: PrefillAdder = self.prefill_adder(
            tree_cache=self.pools.tree_cache,
            token_to_kv_pool_allocator=self.pools.token_to_kv_pool_allocator,
            new_token_ratio=self.new_token_ratio.value,
            tracer=self.tracer,
            **limits,
            **self.cuts,
        )
        return adder

    def _add_chunked(self, adder: PrefillAdder, chunked: Req) -> AddReqResult:
        """Ask for its next piece."""
        chunked.extend_input_len = len(chunked.fill_ids) - len(chunked.prefix_indices)
        return adder.add_chunked_req(chunked)

    def _add_newcomers(
        self, adder: PrefillAdder, waiting: Sequence[Req], is_alone: bool, failures: dict[str, Exception]
    ) -> bool:
        """Let waiting requests in, in the order of the policy, until one does not fit; whether it lacked memory."""
        order = order_of(self.policy, waiting, adder.can_run_list)
        for req in self._fairly(order.ready):
            req.init_next_round_input(self.pools.tree_cache)
            self.tracer.emit(Matched.of, req)
            result = adder.add_one_req(req)
            if result is AddReqResult.NO_TOKEN and is_alone and not adder.can_run_list:
                failures[req.rid] = outgrown(req, self.pools)  # no room: never
            elif result is not AddReqResult.CONTINUE:
                return result is AddReqResult.NO_TOKEN
        return False

    def _fairly(self, ready: Sequence[Req]) -> list[Req]:
        """The order of the policy; but whoever was overtaken too often comes first, the oldest of them before all but
        those who ran already."""
        late = [r for r in ready if self.passed_over.get(r.rid, 0) >= MAX_PASSED_OVER and not r.is_retracted]
        if not late:
            return list(ready)
        first = [req for req in ready if req.is_retracted] + sorted(late, key=lambda req: req.number)
        return [*first, *(req for req in ready if req not in first)]
