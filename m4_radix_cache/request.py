"""Request whose KV may begin with cached pages that other requests computed.

m3's request, and its state in cache, pools and batch. A running request has one row of slots:

    0          cache_protected_len     kv_committed_len    kv_allocated_len
    |  the tree's, locked  |  its own, in no tree yet  |  in flight  |
    |<- prefix_indices, at its start ->|<- extend_input_len ->|

The tree owns whole pages, so the part that the request owns begins on a page boundary. Tokens in flight have slots and
are computed in this step. SGLang: `Req` in `managers/schedule_batch.py`.
"""

from typing import Any

import numpy as np

from m1_single_request.request import RequestStatus, Sequence
from m3_paged_attention.request import Request
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool

NO_SLOTS = np.zeros(0, dtype=np.int64)


class Req(Request):
    """m3's request under SGLang's names, with its row of slots and its node in the tree."""

    def __init__(self, request_id: str, prompt: str | None, sequence: Sequence, seed: int, arrival_time: float) -> None:
        super().__init__(request_id, prompt, sequence, seed, arrival_time)
        self.priority = 0
        self.extra_key: str | None = None  # namespace: KV is shared only with requests of the same one
        self.num_retractions = 0
        self.num_preemptions = 0  # for requests of higher priority
        self.num_in_flight = 0  # of its tokens with KV: those that a step in flight computes (m6)
        self.max_new_tokens = self.sampling_params.max_tokens  # maximum number of output tokens; clipped at intake
        self.fill_ids: list[int] = []  # prompt and outputs, which have KV after its next extend
        self.prefix_indices = NO_SLOTS  # int64: slots of the tokens that have KV before its next extend
        self.last_node: Any = None  # the cache's handle for the prefix, locked while the request runs
        self.cache_protected_len = 0  # tokens whose slots belong to the cache
        self.host_hit_length = 0  # tokens behind the prefix that are in host memory only
        self.last_host_node: Any = None  # the cache's handle for their end
        self.extend_input_len = 0  # tokens to compute
        self.req_pool_idx: int | None = None  # its row of slots, while it runs
        self.req_to_token_pool: ReqToTokenPool | None = None  # where that row is
        self._key: RadixKey | None = None

    @property
    def rid(self) -> str:
        return self.request_id

    @property
    def origin_input_ids(self) -> list[int]:
        return self.sequence.prompt_token_ids

    @property
    def output_ids(self) -> list[int]:
        return self.sequence.output_token_ids

    @property
    def seqlen(self) -> int:
        return self.sequence.get_len()

    @property
    def kv_committed_len(self) -> int:
        """Tokens with KV; between two steps prompt + output - 1, because the newest token has no KV yet."""
        return self.sequence.num_computed_tokens

    @kv_committed_len.setter
    def kv_committed_len(self, num_tokens: int) -> None:
        self.sequence.num_computed_tokens = num_tokens

    @property
    def kv_allocated_len(self) -> int:
        """Tokens with a slot; one more than committed while a decode is in flight."""
        if self.req_pool_idx is None or self.req_to_token_pool is None:
            return 0
        return int(self.req_to_token_pool.lens[self.req_pool_idx])

    @property
    def key(self) -> RadixKey:
        """Cache key of its tokens. Each token is encoded once, at the first access after it was added."""
        if self._key is None:
            self._key = RadixKey(self.origin_input_ids, self.extra_key, self.rid)
        missing = self.seqlen - len(self._key)
        if missing > 0:
            self._key.append(self.output_ids[-missing:])
        return self._key

    @property
    def is_retracted(self) -> bool:
        """Whether it was retracted and waits again."""
        return self.status is RequestStatus.PREEMPTED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its whole prompt must go through the model, for prompt log-probabilities."""
        return self.sampling_params.prompt_logprobs is not None and not self.sequence.has_prompt_logprobs

    @property
    def match_limit(self) -> int:
        """Maximum number of tokens to take from the cache."""
        return 0 if self.wants_prompt_logprobs else self.seqlen - 1

    @property
    def num_known(self) -> int:
        """Tokens with KV before its next extend: those of the prefix, and those that host memory has behind it."""
        return len(self.prefix_indices) + self.host_hit_length

    def finished(self) -> bool:
        return self.is_finished

    def init_next_round_input(self, tree_cache: Any) -> None:
        """Look up its longest cached prefix, and set the number of tokens to compute: at least one.

        The last token must go through the model, because its logits give the next one; so at most all tokens but the
        last are taken from the cache. With prompt log-probabilities none is. The prefix is valid until the next
        eviction, unless `last_node` is locked. Only for a request without a row: the call replaces `last_node`.
        """
        assert self.req_pool_idx is None, f"{self.rid} has a row, and a lock that this would forget"
        self.fill_ids = self.origin_input_ids + self.output_ids
        match = tree_cache.match_prefix(self.key, self.match_limit)
        self.prefix_indices, self.last_node, self.host_hit_length, self.last_host_node = match
        self.cache_protected_len = len(self.prefix_indices)
        self.extend_input_len = len(self.fill_ids) - self.num_known

    def forget_kv(self) -> None:
        """Reset the state of its KV, row and node, after the caller has freed them."""
        self.prefix_indices, self.last_node = NO_SLOTS, None
        self.host_hit_length, self.last_host_node = 0, None
        self.cache_protected_len = self.extend_input_len = self.kv_committed_len = 0
        self.req_pool_idx = self.req_to_token_pool = None
        if not self.sequence.has_prompt_logprobs:
            self.sequence.prompt_logprobs = None  # those of a part of the prompt are useless
