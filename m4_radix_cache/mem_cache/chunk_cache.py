"""No prefix cache: every request computes its whole prompt, and its KV is freed when it ends.

So sharing can be switched off without a branch anywhere else, and measured against. m3 worked like this, except for the
forks of `n > 1`. SGLang: `mem_cache/chunk_cache.py`, which keeps the chunks of a long prompt.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult, row_of
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.request import Req


class ChunkCache(BasePrefixCache):
    """A cache that keeps nothing; a request's KV stays its own."""

    disable: ClassVar[bool] = True

    def _start_empty(self) -> None:
        """Do nothing: the cache is always empty."""

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """Return an empty match."""
        return MatchResult(NO_SLOTS, None)

    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """Raise NotImplementedError: the slots would be lost. The methods below do not call it."""
        raise NotImplementedError("a ChunkCache takes no slots")

    def inc_lock_ref(self, node: Any, rid: str | None = None) -> None:
        """Do nothing: nothing is cached."""

    def dec_lock_ref(self, node: Any, rid: str | None = None) -> None:
        """Do nothing: nothing is cached."""

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Return 0: nothing is cached."""
        return 0

    def check_invariants(self) -> None:
        """Do nothing: nothing is cached."""

    def cache_unfinished_req(self, req: Req) -> None:
        """Set `prefix_indices` to the slots of the request's row: it continues on its own KV."""
        req.prefix_indices = self.req_to_token_pool.read(row_of(req), 0, req.kv_committed_len)

    def cache_finished_req(self, req: Req, *, is_insert: bool = True) -> None:
        """Free all slots of the request."""
        super().cache_finished_req(req, is_insert=False)
