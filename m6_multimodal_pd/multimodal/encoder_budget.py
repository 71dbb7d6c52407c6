"""How far a prompt may go in this step before its pictures cost too much.

A step has a budget of tokens, so that nobody who decodes waits long for somebody's prompt. A picture's tokens cost more
than text: before they go through the model the tower has to make them, all of a picture's at once, even if the piece
ends inside it. So a step has a second budget, of tokens that are encoded; what the embedding cache has costs nothing. A
piece ends in front of the first picture that is too much, and that picture is the first of the next step. vLLM:
`Scheduler._try_schedule_encoder_inputs`; SGLang has no such budget and embeds all pictures of a prompt with its first
piece.
"""

from typing import NamedTuple

from m4_radix_cache.request import Req
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem, MultimodalInputs


class Cost(NamedTuple):
    """What some items together take of a step."""

    encoded: int
    """Tokens that the tower must make."""
    held_bytes: int
    """Embeddings that must stay in the cache during the step."""


class EncoderBudget:
    """A `PieceLimit`: what is left for the pictures of one step."""

    name = "encoder_budget"

    def __init__(self, *, max_tokens: int, bytes_per_token: int, cache: EmbeddingCache) -> None:
        self.max_tokens, self.bytes_per_token, self.cache = max_tokens, bytes_per_token, cache
        self.spent = Cost(0, 0)
        self._held: set[str] = set()  # hashes of the step's items

    def most(self, req: Req, start: int, num_tokens: int) -> int:
        """How many of the tokens from `start` on may run: all, or as many as stand before an item that is too much.

        If nothing else is encoded in this step, an item may be larger than the whole budget. (Intake refuses one that
        is larger than the cache; a cache of somebody's own may be smaller, and then it is held alone.)
        """
        spent, held = self.spent, set(self._held)
        for item in items_within(req, start, start + num_tokens):
            after = self._with(spent, held, item)
            is_too_slow = spent.encoded > 0 and after.encoded > max(self.max_tokens, spent.encoded)
            is_too_large = bool(held) and after.held_bytes > max(self.cache.capacity_bytes, spent.held_bytes)
            if is_too_slow or is_too_large:
                return max(item.start - start, 0)
            spent = after
            held.add(item.hash)
        return num_tokens

    def take(self, req: Req, start: int, num_tokens: int) -> None:
        """These tokens run."""
        for item in items_within(req, start, start + num_tokens):
            self.spent = self._with(self.spent, self._held, item)
            self._held.add(item.hash)

    def _with(self, spent: Cost, held: set[str], item: MultimodalDataItem) -> Cost:
        """What is spent once this item runs, too."""
        if item.hash in held:
            return spent
        encoded = 0 if item.hash in self.cache else item.num_tokens
        return Cost(spent.encoded + encoded, spent.held_bytes + item.num_tokens * self.bytes_per_token)


def items_within(req: Req, start: int, end: int) -> list[MultimodalDataItem]:
    """The items of which these tokens of a request hold a part."""
    inputs = req.multimodal_inputs
    if inputs is None:
        return []
    assert isinstance(inputs, MultimodalInputs)
    return inputs.within(start, end)
