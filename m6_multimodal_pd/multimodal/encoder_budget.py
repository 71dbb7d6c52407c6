"""Step 7 of an image's way: the number of prompt tokens that a step may compute within its budget of tokens to encode.

A step has a budget of tokens, so that requests that decode do not wait long for another request's prompt. A token of an
image costs more than one of text: the vision tower has to compute its embedding first, and those of the whole image
even if the piece of the prompt ends inside it. So a step has a second budget, of tokens to encode; an item in the
embedding cache costs nothing. A piece of a prompt ends before the first item that exceeds the budget, and that item is
the first of the next step: the request in pieces is asked before all others, and the first item of a step may be larger
than the whole budget, so that none waits for ever. vLLM: `Scheduler._try_schedule_encoder_inputs`; SGLang has no such
budget and embeds all images of a prompt with its first piece.
"""

from typing import NamedTuple, cast

from m4_radix_cache.request import Req as RadixReq
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem
from m6_multimodal_pd.request import Req


class Cost(NamedTuple):
    """Cost of some items in a step."""

    encoded: int
    """Number of tokens to encode."""
    held_bytes: int
    """Size of the embeddings that must stay in the cache during the step."""


class EncoderBudget:
    """The budget for the items of one step."""

    def __init__(self, *, max_tokens: int, bytes_per_token: int, cache: EmbeddingCache) -> None:
        self.max_tokens, self.bytes_per_token, self.cache = max_tokens, bytes_per_token, cache
        self.spent = Cost(0, 0)
        self._held: set[str] = set()  # hashes of the step's items

    def most(self, req: RadixReq, start: int, num_tokens: int) -> int:
        """Return how many of the tokens from `start` on may run: all, or those before an item that exceeds the budget.

        If nothing else is encoded in this step, an item may be larger than the whole budget. (Intake rejects an item
        that is larger than the cache; with a cache of a user's own that is smaller, it is the only item of its step.)
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

    def take(self, req: RadixReq, start: int, num_tokens: int) -> None:
        """Charge the items of tokens that run in this step."""
        for item in items_within(req, start, start + num_tokens):
            self.spent = self._with(self.spent, self._held, item)
            self._held.add(item.hash)

    def _with(self, spent: Cost, held: set[str], item: MultimodalDataItem) -> Cost:
        """Return the cost of a step with this item added."""
        if item.hash in held:
            return spent
        encoded = 0 if item.hash in self.cache else item.num_tokens
        return Cost(spent.encoded + encoded, spent.held_bytes + item.num_tokens * self.bytes_per_token)


def items_within(req: RadixReq, start: int, end: int) -> list[MultimodalDataItem]:
    """Return the items with placeholders among these tokens of a request."""
    inputs = cast(Req, req).multimodal_inputs
    return [] if inputs is None else inputs.within(start, end)
