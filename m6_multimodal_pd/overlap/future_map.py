"""Tokens that are not known when a step is scheduled: a placeholder for each, and its token when it is sampled.

A placeholder is negative and names the row of its request: -1 - row. So each running request has exactly one, for its
newest token. SGLang has a ring in place of the rows, which must be longer than all tokens that are on their way (with
prompts in pieces a ring of three batches was too short: sglang-jax #1487). Here no placeholder is overwritten, however
long its request waits for its next step: a request that ends keeps its row until its last step has arrived, and in the
step that retracts one, whose row is free then, no other request starts. mini-sglang indexes its token pool in the same
way.
"""

import numpy as np


class FutureMap:
    """The newest token of each row of slots."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = np.zeros(num_rows, dtype=np.int64)

    @staticmethod
    def placeholders(rows: np.ndarray) -> np.ndarray:
        """Return the placeholder of each row, int64."""
        return -1 - rows

    def store(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Keep the newest tokens of these rows."""
        self.tokens[rows] = token_ids

    def resolve(self, input_ids: np.ndarray) -> np.ndarray:
        """Return `input_ids` with the tokens of all placeholders. Drafts that are still to be made get any token."""
        is_future = input_ids < 0
        if not is_future.any():
            return input_ids
        return np.where(is_future, self.tokens[np.where(is_future, -1 - input_ids, 0)], input_ids)
