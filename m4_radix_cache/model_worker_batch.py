"""Batch as the scheduler sends it to the model runner: plain data without request, pool or tree.

It holds all that the runner needs for a step, as numbers, lists and arrays, so it could be sent to another process. m3
sent `SchedulerOutput`, the changes since the last step, to a runner with state; `ModelWorkerBatch` is complete, and the
runner has no state. SGLang: `ModelWorkerBatch` in `managers/schedule_batch.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np

from m4_radix_cache.sampling_batch_info import SamplingBatchInfo


class ForwardMode(IntEnum):
    """Kind of forward pass. m4 uses the first two; the others are here because an enum cannot be extended."""

    EXTEND = auto()
    """Prefill: new tokens after a prefix with KV."""
    DECODE = auto()
    """One token of each request."""
    MIXED = auto()
    """Prefills and decodes in one pass (m5)."""
    TARGET_VERIFY = auto()
    """One token and several draft tokens of each request, which the logits accept or reject (m5)."""
    PREBUILT = auto()
    """No forward pass: another engine has computed the prompts and their first tokens (m6)."""


@dataclass(eq=False, kw_only=True)
class ModelWorkerBatch:
    """Data of one step; all arrays are on the host. Requests with more than one new token come first."""

    forward_mode: ForwardMode
    rids: list[str]
    input_ids: np.ndarray  # int64 [total_tokens]: the new tokens, one request after the other
    req_pool_indices: np.ndarray  # int64 [batch_size]: rows of `req_to_token`
    seq_lens: np.ndarray  # int64 [batch_size]: tokens with KV after this step
    out_cache_loc: np.ndarray  # int64 [total_tokens]: the slot of each new token
    prefix_lens: list[int] | None
    """Tokens of each request that have KV before an extend; None in a decode."""
    extend_lens: list[int] | None
    """New tokens of each request in an extend; None in a decode, which has one of each."""
    prompts_to_rate: Mapping[str, tuple[list[int], int]]
    """By request id, for requests with prompt log-probabilities: the prompt's token ids in this step and the one after
    them, if there is one; and the number of best tokens to report per position."""
    sampling_info: SamplingBatchInfo
    sample_lens: list[int]
    """Maximum number of tokens to sample for each request: one."""
    num_prompt_tokens: int
    """Number of prefilled tokens among the new ones."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Number of new tokens by request id."""
        return dict(zip(self.rids, self.extend_lens or [1] * len(self.rids), strict=True))
