"""Events of the prefix cache: tokens inserted, evicted, locked and freed, nodes split.

They hold what a view of the cache needs: token ids, pages, locks and access times; `Admit` adds the hits, and the view
decodes the text. Nodes are named by their number: in a tree that of the node, in a table of hashes the page; 0 is the
root. SGLang and vLLM export hit rate and sizes as metrics and record no changes of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some
from m1_single_request.trace_readers import at_most
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.radix_key import RadixKey, decode


@dataclass(frozen=True, kw_only=True)
class Inserted(Event):
    """Tokens were inserted into the cache."""

    style: ClassVar[str] = "green"
    detail: ClassVar[bool] = True
    rid: str | None
    """Id of the request whose tokens they are; None: the cache was called for no request."""
    node: int
    """Node at which the tokens end."""
    parent: int
    """Node below which the new tokens are; the same as `node` if no token was new."""
    extra_key: str | None
    """The namespace."""
    insert_len: int
    """Number of inserted tokens, in whole pages."""
    existing: int
    """Number of those that were cached already."""
    token_ids: tuple[int, ...]
    """The new tokens, as the key has them."""
    pages: tuple[int, ...]
    """Their pages, in order; the cache owns them now. In a table each is a node below the one before it."""
    priority: int
    """Priority of the request: the nodes of a tree up to the root have at least this priority."""
    last_access_time: int | None
    """New access time of the tree's nodes up to the root, in counted look-ups; None in a table, which counts none."""
    evictable: int
    """Cached tokens without a lock, after the event."""
    protected: int
    """Cached tokens with a lock, after the event."""

    @property
    def num_new(self) -> int:
        """Number of tokens that were not cached before."""
        return self.insert_len - self.existing

    @classmethod
    def of(cls, cache: Any, node: Any, parent: Any, key: RadixKey, slots: Slots, existing: int, priority: int) -> Self:
        """Build the event for tokens of a `RadixKey` with KV in `slots`; the first `existing` were cached already."""
        return cls(
            rid=key.rid,
            node=node.id,
            parent=parent.id,
            insert_len=len(slots),
            existing=existing,
            token_ids=tuple(decode(key.data)[existing : len(slots)]),
            pages=tuple((slots[existing :: cache.page_size] // cache.page_size).tolist()),
            extra_key=key.extra_key,
            priority=priority,
            last_access_time=getattr(node, "last_access_time", None),
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
        )

    def explain(self) -> str:
        where = "" if self.extra_key is None else f" under the salt {self.extra_key!r}"
        inserted = f"{self.rid or 'A request'} inserts {some(self.insert_len, 'token')} into the cache{where}"
        if not self.num_new:
            return f"{inserted}: all are cached already. {_sizes(self)}"
        cached = f"{self.existing:,} {is_or_are(self.existing)} cached already, " if self.existing else ""
        below = f"node {self.parent}" if self.parent else "the root"
        return (
            f"{inserted}: {cached}{self.num_new:,} {is_or_are(self.num_new)} new, from {below} down to node "
            f"{self.node}. {_sizes(self)}"
        )


@dataclass(frozen=True, kw_only=True)
class Split(Event):
    """A node of the tree became two, because a request shares only its first tokens."""

    style: ClassVar[str] = "green"
    detail: ClassVar[bool] = True
    rid: str | None
    """Id of that request; None: the cache was called for no request."""
    node: int
    """The old node."""
    upper: int
    """The new node above it."""
    head: int
    """Number of tokens of the new node."""
    tail: int
    """Number of tokens that the old node keeps."""
    lock_ref: int
    """Locks on each of them."""
    last_access_time: int
    """New access time of both nodes and of those above them, in counted look-ups."""

    @classmethod
    def of(cls, upper: Any, node: Any, rid: str | None) -> Self:
        """Build the event for `node`, whose first tokens are in the new node `upper`."""
        return cls(
            rid=rid,
            node=node.id,
            upper=upper.id,
            head=upper.num_tokens,
            tail=node.num_tokens,
            lock_ref=node.lock_ref,
            last_access_time=node.last_access_time,
        )

    def explain(self) -> str:
        locks = f"; both have {some(self.lock_ref, 'lock')}" if self.lock_ref else ""
        return (
            f"Node {self.node} of {some(self.head + self.tail, 'token')} is split, because {self.rid or 'a request'} "
            f"shares only its first {self.head:,}: they become node {self.upper}, and node {self.node} keeps the other "
            f"{self.tail:,} below it{locks}."
        )


@dataclass(frozen=True, kw_only=True)
class Locked(Event):
    """A request starts or stops using a cached prefix. The root needs no lock and has no event."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    rid: str | None
    """Id of that request; None: the cache was called for no request."""
    node: int
    """The deepest locked node; all nodes above it are locked, too."""
    delta: int
    """Change of the number of locks: 1 or -1."""
    num_tokens: int
    """Number of tokens that became protected or evictable: those without another lock."""
    last_access_time: int | None
    """Access time of the node, in counted look-ups; None in a table."""
    evictable: int
    """Cached tokens without a lock, after the event."""
    protected: int
    """Cached tokens with a lock, after the event."""

    @classmethod
    def of(cls, cache: Any, node: Any, delta: int, num_tokens: int, rid: str | None) -> Self:
        """Build the event for one lock more or less on `node`."""
        return cls(
            rid=rid,
            node=node.id,
            delta=delta,
            num_tokens=num_tokens,
            last_access_time=getattr(node, "last_access_time", None),
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
        )

    def explain(self) -> str:
        verb = "adds a lock to" if self.delta > 0 else "removes its lock from"
        lock = f"{self.rid or 'A request'} {verb} the path to node {self.node}"
        if not self.num_tokens:
            return f"{lock}; all of it {'was protected already' if self.delta > 0 else 'stays protected'}."
        moved = f"{some(self.num_tokens, 'token')} {is_or_are(self.num_tokens)}"
        now = "protected now" if self.delta > 0 else "evictable again"
        return f"{lock}: {moved} {now}. {_sizes(self)}"


@dataclass(frozen=True, kw_only=True)
class Evicted(Event):
    """Cached tokens were evicted."""

    style: ClassVar[str] = "yellow"
    rids: tuple[str, ...]
    """Ids of the requests that need the slots: one, or those of a batch."""
    asked: int
    """Number of missing slots."""
    freed: int
    """Number of evicted tokens."""
    nodes: tuple[int, ...]
    """The evicted nodes, in order."""
    token_counts: tuple[int, ...]
    """Number of tokens of each."""
    strategy: str
    """The eviction policy that chose them."""
    evictable: int
    """Cached tokens without a lock, after the event."""
    protected: int
    """Cached tokens with a lock, after the event."""

    def brief(self) -> str:
        return f"evicted{for_requests(self.rids)}: {some(self.freed, 'token')}"

    @classmethod
    def of(cls, cache: Any, asked: int, rids: Sequence[str], evicted: Sequence[tuple[int, int]]) -> Self:
        """Build the event for `evicted` nodes, each with its number of tokens."""
        sizes = {"evictable": cache.evictable_size(), "protected": cache.protected_size()}
        return cls(**eviction(cache, asked, rids, evicted), **sizes)

    def explain(self) -> str:
        short = "" if self.freed >= self.asked else ", all that no request has locked"
        return (
            f"{wanted('slot', self.asked, self.rids)}: "
            f"{some(len(self.nodes), 'node')} with {some(self.freed, 'token')} {is_or_are(len(self.nodes))} evicted, "
            f"chosen by {self.strategy}{short}. {_sizes(self)}"
        )


@dataclass(frozen=True, kw_only=True)
class CacheFlushed(Event):
    """All cached tokens were discarded."""

    style: ClassVar[str] = "yellow"
    evictable: int
    """Number of those without a lock."""
    protected: int
    """Number of those with a lock."""

    def explain(self) -> str:
        number = self.evictable + self.protected
        if not number:
            return "The cache is flushed; it was empty."
        locked = f", {self.protected:,} of them locked" if self.protected else ""
        return f"The cache is flushed: {some(number, 'token')} {is_or_are(number)} discarded{locked}."


@dataclass(frozen=True, kw_only=True)
class DuplicatesFreed(Event):
    """A request computed tokens that another request has cached meanwhile; its own copy was freed."""

    style: ClassVar[str] = "yellow"
    rid: str
    """Request id."""
    start: int
    """Index of the first of these tokens."""
    num_tokens: int
    """Number of these tokens."""

    def explain(self) -> str:
        return (
            f"{self.rid} computed its tokens {self.start:,} to {self.start + self.num_tokens - 1:,}, which another "
            f"request has cached meanwhile: its own copy, {some(self.num_tokens, 'slot')}, is freed."
        )


@dataclass(frozen=True, kw_only=True)
class Released(Event):
    """A request finished or was retracted, and the pages of its KV that are not cached were freed."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    start: int
    """Index of the first token on these pages."""
    num_tokens: int
    """Number of tokens on these pages."""
    pages: tuple[int, ...]
    """The pages, in order."""

    @classmethod
    def of(cls, rid: str, start: int, slots: Slots, page_size: int) -> Self:
        """Build the event for the release of `slots`, those of the tokens from `start` on."""
        pages = tuple((slots[::page_size] // page_size).tolist())
        return cls(rid=rid, start=start, num_tokens=len(slots), pages=pages)

    def explain(self) -> str:
        pages = some(len(self.pages), "page")
        return (
            f"{self.rid} frees {pages} with its last {some(self.num_tokens, 'token')}, which the cache does not keep: "
            f"{', '.join(map(str, self.pages))}."
        )


def listed(rids: Sequence[str]) -> str:
    """Return the first request ids, and the number of the others."""
    return ", ".join(at_most(4, list(rids)))


def for_requests(rids: Sequence[str]) -> str:
    """Return for which requests something happens, or nothing."""
    return f" for {listed(rids)}" if rids else ""


def eviction(cache: Any, asked: int, rids: Sequence[str | None], nodes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the fields that all evictions have. `nodes`: each with its number of tokens."""
    counts = tuple(count for _, count in nodes)
    return {
        "rids": tuple(rid for rid in rids if rid is not None),
        "asked": asked,
        "freed": sum(counts),
        "nodes": tuple(node for node, _ in nodes),
        "token_counts": counts,
        "strategy": cache.eviction_policy,
    }


def wanted(what: str, count: int, rids: Sequence[str]) -> str:
    """Return why something is evicted: requests lack slots, or the cache is told to free some."""
    return f"{some(count, what)} {is_or_are(count)} {'missing' + for_requests(rids) if rids else 'to be freed'}"


def is_or_are(count: int) -> str:
    """Return the verb for a count."""
    return "is" if count == 1 else "are"


def _sizes(event: Inserted | Locked | Evicted) -> str:
    return f"Cached now: {some(event.evictable, 'token')} evictable, {event.protected:,} protected."
