"""Events of the host tier: KV written to host memory, kept there by an eviction, loaded back.

Nodes are those of `mem_cache/events.py`; sizes are in tokens, and bytes are those of all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, size, some, volatile
from m4_radix_cache.mem_cache.events import eviction, for_requests, is_or_are, wanted


@dataclass(frozen=True, kw_only=True)
class WriteStarted(Event):
    """The copy of nodes to host memory begins; they stay on the device."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    rids: tuple[str, ...]
    """Ids of the requests that cause it: one that inserts the nodes or starts from them, or those that evict them."""
    nodes: tuple[int, ...]
    """The nodes, from the root down."""
    num_tokens: int
    """Number of their tokens."""
    num_bytes: int
    """Bytes of their KV."""
    host_used: int
    """Tokens in host memory, after the event."""

    @classmethod
    def of(cls, cache: Any, nodes: Sequence[Any], job: Any) -> Self:
        """Build the event for the job that writes these nodes."""
        return cls(
            rids=known(job.rids),
            nodes=tuple(node.id for node in nodes),
            num_tokens=sum(node.num_tokens for node in nodes),
            num_bytes=job.num_pages * cache.host.page_bytes,
            host_used=cache.host_size(),
        )

    def explain(self) -> str:
        return (
            f"{_nodes(self.nodes)} with {some(self.num_tokens, 'token')} ({size(self.num_bytes)}) "
            f"{is_or_are(len(self.nodes))} copied to host memory{for_requests(self.rids)}, beside the steps. "
            f"{_used(self.host_used)}"
        )


@dataclass(frozen=True, kw_only=True)
class Acknowledged(Event):
    """A copy between device and host has ended."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    rids: tuple[str, ...]
    """Ids of the requests that caused it."""
    direction: str
    """`write`: to host memory; `load`: to the device."""
    nodes: tuple[int, ...]
    """Its nodes; more than at its start if some were split."""
    num_tokens: int
    """Number of their tokens."""
    num_bytes: int
    """Bytes of their KV."""
    error: str | None
    """Error of a write that failed: host memory does not have these nodes. None: no error."""
    copy_ms: float = volatile()
    """Time from the start of the copy to its end."""

    @classmethod
    def of(cls, cache: Any, job: Any) -> Self:
        """Build the event for a job."""
        return cls(
            rids=known(job.rids),
            direction=job.kind,
            nodes=tuple(node.id for node in job.nodes),
            num_tokens=job.num_pages * cache.page_size,
            num_bytes=job.num_pages * cache.host.page_bytes,
            error=None if job.error is None else str(job.error),
            copy_ms=job.seconds * 1e3,
        )

    def explain(self) -> str:
        where = f"to {'host memory' if self.direction == 'write' else 'the device'}{for_requests(self.rids)}"
        copied = f"{_nodes(self.nodes)} with {some(self.num_tokens, 'token')}"
        if self.error is not None:
            return f"{copied} could not be copied {where}: {self.error}. Host memory does not have these tokens."
        speed = f", {self.num_bytes / self.copy_ms / 1e6:.1f} GB/s" if self.copy_ms else ""
        has = "has" if len(self.nodes) == 1 else "have"
        return f"{copied} {has} been copied {where}: {size(self.num_bytes)} in {self.copy_ms:.2f} ms{speed}."


@dataclass(frozen=True, kw_only=True)
class Demoted(Event):
    """Nodes were evicted from the device, and stay in host memory."""

    style: ClassVar[str] = "yellow"
    rids: tuple[str, ...]
    """Ids of the requests that need the slots."""
    asked: int
    """Number of missing slots."""
    freed: int
    """Number of tokens of these nodes."""
    nodes: tuple[int, ...]
    """The nodes, in order."""
    token_counts: tuple[int, ...]
    """Number of tokens of each."""
    strategy: str
    """The eviction policy that chose them."""

    @classmethod
    def of(cls, cache: Any, asked: int, rids: Sequence[str], nodes: Sequence[tuple[int, int]]) -> Self:
        """Build the event for nodes, each with its number of tokens."""
        return cls(**eviction(cache, asked, rids, nodes))

    def brief(self) -> str:
        return f"kept in host memory{for_requests(self.rids)}: {some(self.freed, 'token')}"

    def explain(self) -> str:
        return (
            f"{wanted('slot', self.asked, self.rids)}: {_nodes(self.nodes).lower()} with "
            f"{some(self.freed, 'token')}, chosen by {self.strategy}, {is_or_are(len(self.nodes))} in host memory only "
            f"from now on."
        )


@dataclass(frozen=True, kw_only=True)
class HostEvicted(Event):
    """Nodes that were in host memory only were evicted: their KV is discarded."""

    style: ClassVar[str] = "yellow"
    rids: tuple[str, ...]
    """Ids of the requests for which the room is needed."""
    asked: int
    """Number of tokens for which host memory has no room, or that are to be freed; 0: a node above these was evicted
    from the device, which host memory did not have."""
    freed: int
    """Number of evicted tokens."""
    nodes: tuple[int, ...]
    """The evicted nodes, in order."""
    token_counts: tuple[int, ...]
    """Number of tokens of each."""
    strategy: str
    """The eviction policy that chose them."""
    host_used: int
    """Tokens in host memory, after the event."""

    @classmethod
    def of(cls, cache: Any, asked: int, rids: Sequence[str | None], nodes: Sequence[tuple[int, int]]) -> Self:
        """Build the event for nodes, each with its number of tokens; `asked`: the number of missing pages."""
        return cls(**eviction(cache, asked * cache.page_size, rids, nodes), host_used=cache.host_size())

    def explain(self) -> str:
        nodes, are = f"{_nodes(self.nodes)} with {some(self.freed, 'token')}", is_or_are(len(self.nodes))
        if not self.asked:
            return f"{nodes} {are} discarded with what was above, which host memory lacks. {_used(self.host_used)}"
        why = f"Host memory lacks room for {some(self.asked, 'token')}{for_requests(self.rids)}"
        if not self.rids:
            why = f"{some(self.asked, 'token')} {is_or_are(self.asked)} to leave host memory"
        return f"{why}: {nodes.lower()}, chosen by {self.strategy}, {are} evicted from it. {_used(self.host_used)}"


@dataclass(frozen=True, kw_only=True)
class HostFlushed(Event):
    """Host memory was emptied: these nodes are on the device only. Those without KV there were evicted before."""

    style: ClassVar[str] = "yellow"
    nodes: tuple[int, ...]
    """Nodes whose copies in host memory were discarded."""
    num_tokens: int
    """Number of their tokens."""

    @classmethod
    def of(cls, nodes: Sequence[Any]) -> Self:
        """Build the event for nodes whose copies in host memory were discarded."""
        return cls(nodes=tuple(node.id for node in nodes), num_tokens=sum(node.num_tokens for node in nodes))

    def explain(self) -> str:
        if not self.nodes:
            return "Host memory is flushed."
        is_are = is_or_are(len(self.nodes))
        return (
            f"Host memory is flushed: {_nodes(self.nodes).lower()} with {some(self.num_tokens, 'token')} {is_are} on "
            f"the device only."
        )


@dataclass(frozen=True, kw_only=True)
class LoadBack(Event):
    """The copy of a request's cached tokens from host memory to the device begins."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    nodes: tuple[int, ...]
    """The nodes, each below the one before it."""
    token_counts: tuple[int, ...]
    """Number of tokens of each."""
    pages: tuple[int, ...]
    """Their pages on the device, node after node."""
    num_tokens: int
    """Number of their tokens."""
    num_bytes: int
    """Bytes of their KV."""
    evictable: int
    """Cached tokens on the device without a lock, after the event."""
    protected: int
    """Cached tokens on the device with a lock, after the event."""

    @classmethod
    def of(cls, cache: Any, rid: str, nodes: Sequence[Any], job: Any) -> Self:
        """Build the event for the job that loads these nodes."""
        return cls(
            rid=rid,
            num_bytes=job.num_pages * cache.host.page_bytes,
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
            **_on_device(cache, nodes),
        )

    def brief(self) -> str:
        return f"loaded from host memory for {self.rid}: {some(self.num_tokens, 'token')}"

    def explain(self) -> str:
        return (
            f"{self.rid} finds {some(self.num_tokens, 'token')} more in host memory: {_nodes(self.nodes).lower()} "
            f"({size(self.num_bytes)}) {is_or_are(len(self.nodes))} copied to the device. The forward of a layer waits "
            f"for the KV of that layer only."
        )


@dataclass(frozen=True, kw_only=True)
class Reattached(Event):
    """Tokens that were in host memory only were computed again: their nodes are on the device, too."""

    style: ClassVar[str] = "green"
    detail: ClassVar[bool] = True
    rid: str | None
    """Id of the request that computed them; None: the cache was called for no request."""
    nodes: tuple[int, ...]
    """The nodes, each below the one before it."""
    token_counts: tuple[int, ...]
    """Number of tokens of each."""
    pages: tuple[int, ...]
    """Their pages on the device, node after node."""
    num_tokens: int
    """Number of their tokens."""

    @classmethod
    def of(cls, cache: Any, rid: str | None, nodes: Sequence[Any]) -> Self:
        """Build the event for these nodes."""
        return cls(rid=rid, **_on_device(cache, nodes))

    def explain(self) -> str:
        return (
            f"{_nodes(self.nodes)} with {some(self.num_tokens, 'token')} {is_or_are(len(self.nodes))} on the "
            f"device again: {self.rid or 'a request'} has computed what was in host memory only."
        )


def _on_device(cache: Any, nodes: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of nodes that come to the device."""
    pages = [page for node in nodes for page in (node.value[:: cache.page_size] // cache.page_size).tolist()]
    counts = tuple(node.num_tokens for node in nodes)
    ids = tuple(node.id for node in nodes)
    return {"nodes": ids, "token_counts": counts, "pages": tuple(pages), "num_tokens": sum(counts)}


def known(rids: Sequence[str | None]) -> tuple[str, ...]:
    """Return the request ids without None, which stands for no request."""
    return tuple(rid for rid in rids if rid is not None)


def _nodes(nodes: Sequence[int]) -> str:
    """Return `Node 3`, or `2 nodes`."""
    return f"Node {nodes[0]}" if len(nodes) == 1 else some(len(nodes), "node")


def _used(num_tokens: int) -> str:
    return f"Host memory holds {some(num_tokens, 'token')} now."
