"""Typical mistakes in a schedule policy, each with the hint that it must get."""

from collections.abc import Sequence
from typing import Any

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import PolicyOrder
from m4_radix_cache.schedule_policy import MAX_WAITING_FOR_LPM, Order, SchedulePolicy, _Coming


class ShortestFirst(SchedulePolicy):
    """Fewest cached tokens first."""

    def _sorted(self, policy: str, requests: list[Any], matches: Any) -> list[Any]:
        ordered = super()._sorted(policy, requests, matches)
        return ordered[::-1] if policy == "lpm" else ordered


class FewestLeftFirst(SchedulePolicy):
    """Fewest tokens to compute first."""

    def _sorted(self, policy: str, requests: list[Any], matches: Any) -> list[Any]:
        if policy != "lpm":
            return requests
        return sorted(requests, key=lambda req: req.seqlen - len(matches[req.rid].device_indices))


class AsListed(SchedulePolicy):
    """Ties in the order of the list."""

    def _sorted(self, policy: str, requests: list[Any], matches: Any) -> list[Any]:
        return super()._sorted(policy, sorted(requests, key=lambda req: self.listed.index(req)), matches)

    def calc_priority(self, waiting: Sequence[Any]) -> Order:
        self.listed = list(waiting)
        return super().calc_priority(waiting)


class TakesTheLastToken(SchedulePolicy):
    """The lookup has no limit."""

    def _match(self, req: Any) -> Any:
        return self.tree_cache.match_prefix(req.key)


class ForgetsRetracted(SchedulePolicy):
    """Retracted requests are sorted in."""

    def calc_priority(self, waiting: Sequence[Any]) -> Order:
        order = super().calc_priority(waiting)
        matches = {req.rid: self._match(req) for req in order.ready}
        arrived = sorted(order.ready, key=lambda req: req.number)
        return Order(self._sorted(self._active_policy(len(waiting)), arrived, matches), order.held_back)


class GoesLast(SchedulePolicy):
    """Nobody is held back; whoever would be goes last, in the same step."""

    def calc_priority(self, waiting: Sequence[Any]) -> Order:
        order = super().calc_priority(waiting)
        return Order(order.ready + order.held_back, [])


class AnyToken(SchedulePolicy):
    """One common token is enough to wait."""

    def _hold_back(self, first: Any, others: Any, matches: Any) -> Any:
        ready, held_back = super()._hold_back(first, others, matches)
        heads = {req.key.data[:4] for req in [*first, *ready[:1]]}
        more = [req for req in ready[1:] if matches and req.key.data[:4] in heads]
        return [req for req in ready if req not in more], sorted(held_back + more, key=lambda req: req.number)


class NoWholePages(SchedulePolicy):
    """Common tokens are not counted in whole pages."""

    def _hold_back(self, first: Any, others: Any, matches: Any) -> Any:
        whole = self.tree_cache.page_size
        self.tree_cache.page_size = 1
        try:
            return super()._hold_back(first, others, matches)
        finally:
            self.tree_cache.page_size = whole


class WaitsForNothing(SchedulePolicy):
    """A request is held back even if it has all that it can use."""

    def _longest_hit(self, req: Any) -> int:
        return len(req.key) + 1


class SharesAcrossNamespaces(SchedulePolicy):
    """Tokens are compared, and not their namespaces."""

    def _hold_back(self, first: Any, others: Any, matches: Any) -> Any:
        before, _Coming._head = _Coming._head, lambda self, key, n: (None, key.data[: n * 4])  # type: ignore[assignment]
        try:
            return super()._hold_back(first, others, matches)
        finally:
            _Coming._head = before  # type: ignore[method-assign]


class NoneIsAParent(SchedulePolicy):
    """Requests without a parent are siblings of each other."""

    def _hold_back(self, first: Any, others: Any, matches: Any) -> Any:
        orphans = [req for req in [*first, *others] if req.parent_id is None]
        for req in orphans:
            req.parent_id = "none"
        try:
            return super()._hold_back(first, others, matches)
        finally:
            for req in orphans:
                req.parent_id = None


class NoSiblings(SchedulePolicy):
    """Siblings are requests like any others."""

    def _hold_back(self, first: Any, others: Any, matches: Any) -> Any:
        parents = {req.rid: req.parent_id for req in [*first, *others]}
        for req in [*first, *others]:
            req.parent_id = None
        try:
            return super()._hold_back(first, others, matches)
        finally:
            for req in [*first, *others]:
                req.parent_id = parents[req.rid]


class OneTooFew(SchedulePolicy):
    """Of 128 requests none is looked up."""

    def _active_policy(self, num_waiting: int) -> str:
        return "fcfs" if num_waiting >= MAX_WAITING_FOR_LPM else super()._active_policy(num_waiting)


class TracesSiblings(SchedulePolicy):
    """Under `fcfs` the lookups of siblings are traced, and those of the others are not there."""

    def calc_priority(self, waiting: Sequence[Any]) -> Order:
        if self.policy == "lpm":
            return super().calc_priority(waiting)
        tracer, self.tracer = self.tracer, Tracer()
        order = super().calc_priority(waiting)
        self.tracer = tracer
        parents = [req.parent_id for req in waiting if req.parent_id is not None]
        found = {req.rid: self._match(req) for req in waiting if parents.count(req.parent_id) > 1}
        self.tracer.emit(PolicyOrder.of, self.policy, self.policy, order, 0, found)
        return order


class SortsTheQueue(SchedulePolicy):
    """The list of the caller is sorted."""

    def calc_priority(self, waiting: Any) -> Order:
        waiting.sort(key=lambda req: req.number)
        return super().calc_priority(waiting)


WRONG = [
    (GoesLast, "one round later"),
    (ShortestFirst, "More cached tokens go first"),
    (FewestLeftFirst, "not the length of the request"),
    (AsListed, "Sort by arrival first"),
    (TakesTheLastToken, "match_prefix(req.key, req.match_limit)"),
    (ForgetsRetracted, "They have waited once already"),
    (AnyToken, "at least 32 of them"),
    (NoWholePages, "in whole pages, because only these are shared"),
    (WaitsForNothing, "If it has these, it is not held back"),
    (SharesAcrossNamespaces, "Compare extra_key"),
    (NoneIsAParent, "None is no parent"),
    (NoSiblings, "Siblings have the same parent_id"),
    (OneTooFew, "Up to 128 requests it is lpm"),
    (TracesSiblings, "under fcfs with {}"),
    (SortsTheQueue, "Sort a copy"),
]
