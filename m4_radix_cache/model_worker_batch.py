"""A batch on its way to the device: plain data, no request, no pool, no tree.

Whatever the model runner must know of a step stands here as numbers, lists and arrays, so it could cross a process. m3
sent `SchedulerOutput`, differences to what the runner remembered; this one is complete every time, and the runner
remembers nothing. SGLang: `ModelWorkerBatch` in `managers/schedule_batch.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np

from m4_radix_cache.sampling_batch_info import SamplingBatchInfo


class ForwardMode(IntEnum):
    """What a forward does for its requests: the same for all of them here, so one of the first two."""

    EXTEND = auto()
    """New tokens behind a prefix that has its KV: prefills."""
    DECODE = auto()
    """One token each."""
    MIXED = auto()
    """Both, side by side (from m5 on)."""
    TARGET_VERIFY = auto()
    """One token and some guessed ones, whose logits tell which of them are right (from m5 on)."""
    PREBUILT = auto()
    """Nothing goes through the model: another engine has computed prompts and their first tokens (from m6 on)."""


@dataclass(frozen=True, kw_only=True)
class ModelWorkerBatch:
    """One step; all arrays are of the host. Here requests with more than one new token come first."""

    forward_mode: ForwardMode
    rids: list[str]
    input_ids: np.ndarray  # int64 [total_tokens]: the new tokens, one request after the other
    req_pool_indices: np.ndarray  # int64 [batch_size]: rows of `req_to_token`
    seq_lens: np.ndarray  # int64 [batch_size]: tokens with KV after this step
    out_cache_loc: np.ndarray  # int64 [total_tokens]: the slot of each new token
    prefix_lens: list[int] | None
    """Tokens that have their KV, in an extend."""
    extend_lens: list[int] | None
    """New tokens, in an extend; a decode has one each."""
    prompts_to_rate: Mapping[str, tuple[list[int], int]]
    """Requests whose prompt's log-probabilities are asked for: its token ids that are in this step, and the next one if
    it is not the last; and how many of the best."""
    sampling_info: SamplingBatchInfo
    sample_lens: list[int]
    """The number of tokens that each request may get: one."""
    num_prompt_tokens: int
    """The number of prefilled tokens among the new ones."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """New tokens by request id."""
        return dict(zip(self.rids, self.extend_lens or [1] * len(self.rids), strict=True))
