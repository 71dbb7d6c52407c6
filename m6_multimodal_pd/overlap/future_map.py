"""Tokens that are not known when a step is scheduled: a placeholder for each, and its token when it is there.

A placeholder is negative and names the row of its request: -1 - row. So each running request has exactly one, for its
newest token. SGLang has a ring in place of the rows, which must be longer than all tokens that are on their way (with
prompts in pieces a ring of three batches was too short: sglang-jax #1487). Here no placeholder is overwritten, however
long its request waits for its next step: a request that ends keeps its row until its last step has arrived. The row
of a retracted or preempted one is free at once; its token is written before the first one of the next owner: the device
runs step after step. mini-sglang indexes its token pool in the same way.
"""

import numpy as np
import torch
from torch import Tensor


class FutureMap:
    """The newest token of each row of slots: as far as the host knows it, and as far as the device has chosen it."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.tokens = np.zeros(num_rows, dtype=np.int64)
        self.on_device = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @staticmethod
    def placeholders(rows: np.ndarray) -> np.ndarray:
        """Return the placeholder of each row, int64."""
        return -1 - rows

    def store(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Keep the newest tokens of these rows, which the host has read."""
        self.tokens[rows] = token_ids

    def resolve(self, input_ids: np.ndarray, unread: np.ndarray | None) -> np.ndarray:
        """Return a copy of `input_ids` with the tokens that the host knows in place of their placeholders.

        `unread`: the rows whose newest tokens only the device knows. Drafts that are still to be made get any token.
        """
        is_known = input_ids < 0
        rows = np.where(is_known, -1 - input_ids, 0)
        if unread is not None:
            is_unread = np.zeros(len(self.tokens), dtype=np.bool_)
            is_unread[unread] = True
            is_known &= ~is_unread[rows]
        return np.where(is_known, self.tokens[rows], input_ids)

    def resolve_on_device(self, input_ids: Tensor) -> None:
        """Replace all placeholders by tokens that the device has chosen, in place."""
        rows = (-1 - input_ids).clamp_(min=0)
        input_ids.copy_(torch.where(input_ids < 0, self.on_device[rows], input_ids))
