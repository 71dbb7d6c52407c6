"""Events of the disk tier: pages asked for and found, and what goes wrong."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some, volatile
from m4_radix_cache.mem_cache.events import for_requests
from m4_radix_cache.mem_cache.host_events import known


@dataclass(frozen=True, kw_only=True)
class DiskWriteStarted(Event):
    """The pages of a node, which host memory has now, are written to the disk, but for those that are there already."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    rids: tuple[str, ...]
    """Ids of the requests for which the node was copied to host memory."""
    node: int
    """The node."""
    num_tokens: int
    """Number of its tokens whose pages are written: all, or those before its first image."""

    @classmethod
    def of(cls, job: Any, node: Any, num_tokens: int) -> Self:
        """Build the event for a node that `job` has copied to host memory."""
        return cls(rids=known(job.rids), node=node.id, num_tokens=num_tokens)

    def explain(self) -> str:
        return (
            f"{some(self.num_tokens, 'token')} of node {self.node} {'goes' if self.num_tokens == 1 else 'go'} to the "
            f"disk{for_requests(self.rids)}, beside the steps; a page that is there already is not written again."
        )


@dataclass(frozen=True, kw_only=True)
class PrefetchStarted(Event):
    """Pages of a request that has arrived are read from the disk; the request waits."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    asked: int
    """Number of tokens whose pages are read, up to the first page that is missing."""
    policy: str
    """How long the request waits: `best_effort`, `wait_complete` or `timeout`."""

    def explain(self) -> str:
        return (
            f"The disk has KV of {self.rid}: the pages of its next {some(self.asked, 'token')} are read to host "
            f"memory, up to the first one that is missing ({self.policy})."
        )


@dataclass(frozen=True, kw_only=True)
class Prefetched(Event):
    """A request no longer waits for the disk; the pages that have arrived are cached in host memory."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    asked: int
    """Number of tokens whose pages were to be read."""
    found: int
    """Number of tokens whose pages have arrived."""
    waited_ms: float = volatile()
    """Time since the read began."""
    failure: str | None
    """Error of the page behind them: damaged, or not readable. None: no error, or this page is not on the disk."""
    node: int | None
    """The new node with these tokens; None: there is none."""
    parent: int | None
    """The node above it."""
    extra_key: str | None
    """The namespace."""
    token_ids: tuple[int, ...]
    """The tokens of the new node: the last ones of those that have arrived."""
    last_access_time: int | None
    """Its access time, in counted look-ups."""

    @classmethod
    def of(cls, rid: str, prefetch: Any, node: Any, asked: int, found: int, seconds: float) -> Self:
        """Build the event for a prefetch, whose pages are in `node`."""
        end = prefetch.start + found
        return cls(
            rid=rid,
            asked=asked,
            found=found,
            waited_ms=seconds * 1e3,
            failure=prefetch.failure,
            node=None if node is None else node.id,
            parent=None if node is None else node.parent.id,
            extra_key=prefetch.key.extra_key,
            last_access_time=None if node is None else node.last_access_time,
            token_ids=() if node is None else tuple(prefetch.key.token_ids(end - node.num_tokens, end)),
        )

    def explain(self) -> str:
        why = "" if self.failure is None else f" The page behind them cannot be used: {self.failure}."
        new = "" if self.node is None else f", of which {len(self.token_ids):,} are new there: node {self.node}"
        return (
            f"{self.rid} has waited {self.waited_ms:.1f} ms for the disk: KV of {self.found:,} of "
            f"{some(self.asked, 'token')} was read to host memory{new}.{why}"
        )


@dataclass(frozen=True, kw_only=True)
class DiskFailed(Event):
    """A page could not be written to the disk. The engine goes on without it."""

    style: ClassVar[str] = "red"
    reason: str
    """Error of the write."""

    def explain(self) -> str:
        return f"A page of KV could not be written to the disk: {self.reason}. It is not cached there."
