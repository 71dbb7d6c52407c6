"""What the trace can say about the prefix cache: what was found, kept, split, locked and thrown out, and an audit.

m3 spoke of blocks and who holds them. Here KV has an owner that is no request, the cache, and what matters is how much
of it is free, evictable or protected. What happens to requests stands in `scheduler_events.py`. SGLang exports the hit
rate and the sizes as metrics; what its tree does is not recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some


@dataclass(frozen=True, kw_only=True)
class Matched(Event):
    """A request was looked up in the prefix cache."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    query_len: int
    """Tokens that the request has."""
    limit: int
    """Tokens that it may take from the cache: all but the last, because that one's logits are needed, or none, because
    those of the whole prompt are."""
    device_hit: int
    """Tokens found; the request starts from their KV."""
    host_hit: int
    """Further tokens found in host memory, whose KV must be copied."""

    @classmethod
    def of(cls, req: Any) -> Self:
        """Build the event for a request after its lookup."""
        hit, limit = len(req.prefix_indices), req.match_limit
        return cls(rid=req.rid, query_len=len(req.fill_ids), limit=limit, device_hit=hit, host_hit=0)

    def explain(self) -> str:
        tokens, left = some(self.query_len, "token"), self.query_len - self.device_hit - self.host_hit
        if left == self.query_len:
            why = "the logits of its whole prompt are wanted" if self.limit < left - 1 else "nothing of use is cached"
            return f"{self.rid} can skip none of its {tokens}: {why}."
        host = f", and {self.host_hit:,} more in host memory" if self.host_hit else ""
        return (
            f"{self.rid} can skip {self.device_hit:,} of its {tokens}, whose KV is in the cache{host}; {self.limit:,} "
            f"would be the most, in whole pages. {left:,} {_are(left)} left to compute."
        )


@dataclass(frozen=True, kw_only=True)
class Inserted(Event):
    """Tokens were put into the cache."""

    style: ClassVar[str] = "green"
    detail: ClassVar[bool] = True
    node: int
    """Where they end: number of a node of the tree, or of a page of the table."""
    parent: int
    """Where the new ones hang; the same as `node` if nothing was new, 0 for the root."""
    extra_key: str | None
    """The namespace."""
    insert_len: int
    """Tokens that were offered, in whole pages."""
    existing: int
    """How many of them were there already."""
    pages: tuple[int, ...]
    """The pages of the others, in order: the cache owns them now."""
    evictable: int
    """Cached tokens that nobody has locked, now."""
    protected: int
    """Cached tokens that some request has locked, now."""

    @property
    def num_new(self) -> int:
        """Tokens that the cache owns now and did not before."""
        return self.insert_len - self.existing

    @classmethod
    def of(cls, cache: Any, node: int, parent: int, slots: Any, existing: int, extra_key: str | None) -> Self:
        """Build the event for the insertion of tokens in `slots`, of which the first `existing` were cached."""
        return cls(
            node=node,
            parent=parent,
            insert_len=len(slots),
            existing=existing,
            pages=tuple((slots[existing :: cache.page_size] // cache.page_size).tolist()),
            extra_key=extra_key,
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
        )

    def explain(self) -> str:
        where = "" if self.extra_key is None else f" under the salt {self.extra_key!r}"
        offered = f"{some(self.insert_len, 'token')} {_are(self.insert_len)} offered to the cache{where}"
        if not self.num_new:
            return f"{offered}, which has them all. {_sizes(self.evictable, self.protected)}"
        there = f"it has {self.existing:,} of them, " if self.existing else ""
        below = f"node {self.parent}" if self.parent else "the root"
        return (
            f"{offered}: {there}{self.num_new:,} {_are(self.num_new)} new, from {below} down to node {self.node}. "
            f"{_sizes(self.evictable, self.protected)}"
        )


@dataclass(frozen=True, kw_only=True)
class Split(Event):
    """A node of the tree became two, because somebody shares only the first part of it."""

    style: ClassVar[str] = "green"
    detail: ClassVar[bool] = True
    node: int
    """The old node."""
    upper: int
    """The new one above it."""
    head: int
    """Tokens that the new one has now."""
    tail: int
    """Tokens that the old one keeps."""
    lock_ref: int
    """Locks on both."""

    def explain(self) -> str:
        locks = f"; both have {some(self.lock_ref, 'lock')}" if self.lock_ref else ""
        return (
            f"Node {self.node} of {some(self.head + self.tail, 'token')} is split, because somebody shares only the "
            f"first {self.head:,}: these are node {self.upper} now, and it keeps the other {self.tail:,} below "
            f"that{locks}."
        )


@dataclass(frozen=True, kw_only=True)
class Locked(Event):
    """A request has begun or ceased to use a cached prefix. Nothing is told of the root, which needs no lock."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    node: int
    """The deepest node (or page) that is locked; all above it are, too."""
    delta: int
    """1: a lock more; -1: one less."""
    num_tokens: int
    """Tokens that it protects and nobody else does: these changed sides."""
    evictable: int
    """Cached tokens that nobody has locked, now."""
    protected: int
    """Cached tokens that some request has locked, now."""

    def explain(self) -> str:
        path = f"The path to node {self.node} has one lock {'more' if self.delta > 0 else 'less'}"
        if not self.num_tokens:
            return f"{path}; all of it {'was protected already' if self.delta > 0 else 'stays protected'}."
        moved = f"{some(self.num_tokens, 'token')} {_are(self.num_tokens)}"
        now = "protected now" if self.delta > 0 else "evictable again"
        return f"{path}: {moved} {now}. {_sizes(self.evictable, self.protected)}"


@dataclass(frozen=True, kw_only=True)
class Evicted(Event):
    """Cached tokens were thrown out to make room."""

    style: ClassVar[str] = "yellow"
    asked: int
    """Tokens for which there was no room."""
    freed: int
    """Tokens that went."""
    nodes: tuple[int, ...]
    """The nodes (or pages) that went, in this order."""
    token_counts: tuple[int, ...]
    """Tokens of each of them."""
    strategy: str
    """The rule that chose them."""
    evictable: int
    """Cached tokens that nobody has locked, now."""
    protected: int
    """Cached tokens that some request has locked, now."""

    @property
    def num_nodes(self) -> int:
        """How many went."""
        return len(self.nodes)

    def brief(self) -> str:
        return f"evicted: {some(self.freed, 'token')}"

    @classmethod
    def of(cls, cache: Any, asked: int, evicted: Sequence[tuple[int, int]]) -> Self:
        """Build the event for `evicted` nodes, each with its number of tokens."""
        return cls(
            asked=asked,
            freed=sum(count for _, count in evicted),
            nodes=tuple(node for node, _ in evicted),
            token_counts=tuple(count for _, count in evicted),
            strategy=cache.eviction_policy,
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
        )

    def explain(self) -> str:
        short = "" if self.freed >= self.asked else ", all that nobody has locked"
        return (
            f"{some(self.asked, 'slot')} {_are(self.asked)} missing: {some(self.num_nodes, 'node')} with "
            f"{some(self.freed, 'token')} {'goes' if self.num_nodes == 1 else 'go'}, chosen by "
            f"{self.strategy}{short}. {_sizes(self.evictable, self.protected)}"
        )


@dataclass(frozen=True, kw_only=True)
class CacheFlushed(Event):
    """The cache forgot everything."""

    style: ClassVar[str] = "yellow"
    evictable: int
    """Tokens that it held without a lock."""
    protected: int
    """Tokens that it held locked."""

    def explain(self) -> str:
        number = self.evictable + self.protected
        if not number:
            return "The cache is emptied; it held nothing."
        locked = f", {self.protected:,} of them locked" if self.protected else ""
        return f"The cache is emptied: {some(number, 'token')} {_are(number)} forgotten{locked}."


@dataclass(frozen=True, kw_only=True)
class DuplicatesFreed(Event):
    """A request has computed what the cache has from another one; its own copy is free."""

    style: ClassVar[str] = "yellow"
    rid: str
    """Whose copy it was."""
    start: int
    """The first of these tokens."""
    num_tokens: int
    """How many they are."""

    def explain(self) -> str:
        return (
            f"{self.rid} computed its tokens {self.start:,} to {self.start + self.num_tokens - 1:,}, and so did "
            f"another request, whose copy the cache has: its own, {some(self.num_tokens, 'slot')}, is free."
        )


@dataclass(frozen=True, kw_only=True)
class Released(Event):
    """A request ends or loses its place, and some of its KV goes into no cache; those pages are free."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    start: int
    """The first of its tokens on them."""
    num_tokens: int
    """How many they are."""
    pages: tuple[int, ...]
    """The pages, in order."""

    @classmethod
    def of(cls, rid: str, start: int, slots: Any, page_size: int) -> Self:
        """Build the event for the release of `slots`, those from position `start` on."""
        pages = tuple((slots[::page_size] // page_size).tolist())
        return cls(rid=rid, start=start, num_tokens=len(slots), pages=pages)

    def explain(self) -> str:
        pages = some(len(self.pages), "page")
        return (
            f"{self.rid} gives {pages} back, with the slots of its last {some(self.num_tokens, 'token')}, "
            f"which the cache does not keep: {', '.join(map(str, self.pages))}."
        )


@dataclass(frozen=True, kw_only=True)
class Audit(Event):
    """Every slot has exactly one owner."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    available: int
    """Slots that are free."""
    evictable: int
    """Slots of cached tokens that nobody has locked."""
    protected: int
    """Slots of cached tokens that some request has locked."""
    owned: int
    """Slots in pages that requests own themselves."""
    total: int
    """All slots."""

    @classmethod
    def of(cls, scheduler: Any, pages_of: Callable[..., Any]) -> Self:
        """Build the event from the memory of a scheduler. `pages_of` returns the pages that requests own."""
        _, own = pages_of(scheduler.running, scheduler.pools)
        allocator, cache = scheduler.pools.token_to_kv_pool_allocator, scheduler.tree_cache
        return cls(
            available=allocator.available_size(),
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
            owned=len(own) * allocator.page_size,
            total=allocator.size,
        )

    @property
    def holds(self) -> bool:
        """Whether the four parts make up the whole."""
        return self.available + self.evictable + self.protected + self.owned == self.total

    def counters(self) -> dict[str, float]:
        return {
            "KV slots free": self.available,
            "KV slots evictable": self.evictable,
            "KV slots protected": self.protected,
            "KV slots owned": self.owned,
        }

    def explain(self) -> str:
        parts = f"{self.available:,} free + {self.evictable:,} evictable + {self.protected:,} protected + "
        parts += f"{self.owned:,} owned by requests"
        if self.holds:
            return f"{parts} = {some(self.total, 'slot')}: none is lost, none counted twice."
        off = self.total - self.available - self.evictable - self.protected - self.owned
        what = f"{some(off, 'slot')} lost" if off > 0 else f"{some(-off, 'slot')} counted twice"
        return f"{parts} is not {some(self.total, 'slot')}: {what}."


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _sizes(evictable: int, protected: int) -> str:
    return f"Cached now: {some(evictable, 'token')} evictable, {protected:,} protected."
