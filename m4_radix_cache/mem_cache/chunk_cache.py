"""No prefix cache: every request computes its whole prompt, and its KV is free when it ends.

So sharing can be switched off without a branch anywhere else, and measured against. m3 worked like this, except for the
forks of `n > 1`. SGLang: `mem_cache/chunk_cache.py`, named after what it still does there: keep the chunks of a long
prompt.
"""

from typing import Any, ClassVar

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, CacheableReq, MatchResult
from m4_radix_cache.mem_cache.radix_key import RadixKey


class ChunkCache(BasePrefixCache):
    """Finds nothing, keeps nothing; a request's KV stays its own."""

    disable: ClassVar[bool] = True

    def _start_empty(self) -> None:
        """It always is."""

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """Nothing is cached."""
        return MatchResult(NO_SLOTS, None, None)

    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """Never called by the methods below; what it were given would be lost."""
        raise NotImplementedError("a ChunkCache takes no slots")

    def inc_lock_ref(self, node: Any) -> None:
        """There is nothing to protect."""

    def dec_lock_ref(self, node: Any) -> None:
        """There is nothing to protect."""

    def evict(self, num_tokens: int) -> int:
        """There is nothing to evict."""
        return 0

    def check_invariants(self) -> None:
        """There is nothing to check."""

    def cache_unfinished_req(self, req: CacheableReq) -> None:
        """The request goes on from its own KV: `prefix_indices` are the slots in its row."""
        assert req.req_pool_idx is not None, f"{req.rid} has no row"
        req.prefix_indices = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_committed_len)

    def cache_finished_req(self, req: CacheableReq, *, is_insert: bool = True) -> None:
        """Everything that the request held is free."""
        super().cache_finished_req(req, is_insert=False)
