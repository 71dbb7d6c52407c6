"""The dense KV cache: one tensor for all requests, a slot for each, as long as the longest may become.

    keys, values  [layers, max_num_seqs, kv_heads, max_len, head_dim]

    slot 0  | k k k k k k k k k . . . . . . . . . . . . . |   a request of 9 tokens
    slot 1  | k k k . . . . . . . . . . . . . . . . . . . |   one of 3
    slot 2  | . . . . . . . . . . . . . . . . . . . . . . |   free

A request writes into its own slot only, so joining and leaving moves nobody's data. The dots are the price: reserved,
and empty. The tensor stands behind transformers' `Cache` interface, so that the model's own code can use it; before
each forward, `plan_prefill` or `plan_decode` says which rows of the batch belong to which slots. m3 replaces slots by
blocks of a few tokens. TensorRT-LLM calls such a cache contiguous.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from m1_single_request.errors import ConfigError
from m1_single_request.events import size
from m1_single_request.model_loader import LoadedModel, head_dim
from m2_continuous_batching.memory import available_memory


class SlotCache(Cache):
    """KV of all slots, and what the coming forward does with them."""

    def __init__(self, *, loaded_model: LoadedModel, max_num_seqs: int) -> None:
        """Reserve the memory, all of it, at once. Raises `ConfigError` where there is not so much."""
        config = loaded_model.model.config
        self.num_slots, self.slot_len = max_num_seqs, loaded_model.max_model_len
        shape = (config.num_hidden_layers, max_num_seqs, config.num_key_value_heads, self.slot_len, head_dim(config))
        self.num_bytes = max_num_seqs * self.slot_len * loaded_model.kv_bytes_per_token
        self._check_memory(loaded_model)
        try:
            self.key_cache = torch.zeros(shape, dtype=loaded_model.dtype, device=loaded_model.device)
            self.value_cache = torch.zeros_like(self.key_cache)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise ConfigError(f"{self._need()}, which cannot be had: {error}") from error
        self.slots = torch.empty(0, dtype=torch.int64)  # of the coming forward's rows
        self.positions: Tensor | None = None  # where each row's one new token goes; None: whole prompts, from 0 on
        self.width = 0  # how many positions of each slot the forward reads
        self.together = False
        super().__init__(layers=[SlotLayer(self, k, v) for k, v in zip(self.key_cache, self.value_cache, strict=True)])

    def plan_prefill(self, slots: Tensor, longest: int) -> None:
        """The coming forward brings whole prompts for `slots` `[rows]`, padded on the right to `longest`."""
        self.slots, self.positions, self.width, self.together = slots, None, longest, False

    def plan_decode(self, slots: Tensor, positions: Tensor, width: int, *, together: bool) -> None:
        """The coming forward brings one token for each of `slots` `[rows]`, to be written at `positions` `[rows]`.

        It reads the first `width` positions. `together`: the slots are 0, 1, 2, ..., so that their KV is read in place;
        any others are copied together for the forward.
        """
        self.slots, self.positions, self.width, self.together = slots, positions, width, together

    def clear(self, slot: int, length: int) -> None:
        """Wipe the first `length` positions of a slot.

        What the next owner does not overwrite it masks, and gives it the weight 0; but the value is still multiplied by
        that 0, and NaN times zero is NaN: a request that failed must not leave any behind.
        """
        self.key_cache[:, slot, :, :length].zero_()
        self.value_cache[:, slot, :, :length].zero_()

    def _need(self) -> str:
        return f"a KV cache of {self.num_slots:,} slots x {self.slot_len:,} tokens takes {size(self.num_bytes)}"

    def _check_memory(self, loaded: LoadedModel) -> None:
        """Refuse what cannot fit, with the largest that does."""
        available = available_memory(loaded.device)
        if available is None or self.num_bytes <= available:
            return
        per_token = loaded.kv_bytes_per_token
        ways = ["execution='per_request'"]
        if (num_seqs := available // (self.slot_len * per_token)) >= 1:
            ways.insert(0, f"max_num_seqs of at most {num_seqs:,}")
        if (length := available // (self.num_slots * per_token)) >= 2:
            ways.insert(0, f"max_model_len of at most {length:,}")
        raise ConfigError(
            f"{self._need()}; of {loaded.device} memory {size(available)} may be taken. Use {' or '.join(ways)}"
        )


class SlotLayer(CacheLayerMixin):
    """One layer's share of a `SlotCache`: what transformers' attention talks to."""

    def __init__(self, cache: SlotCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.keys: Tensor = keys  # [slots, kv_heads, max_len, head_dim]
        self.values: Tensor = values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values `[rows, kv_heads, new, head_dim]`; return those that the queries may see.

        A prefill sees what it brought, `[rows, kv_heads, longest, head_dim]`: there is nothing before it. A decode sees
        its slots, `[rows, kv_heads, width, head_dim]`.
        """
        cache, slots = self.cache, self.cache.slots
        if cache.positions is None:
            self.keys[slots, :, : cache.width] = key_states
            self.values[slots, :, : cache.width] = value_states
            return key_states, value_states
        self.keys[slots, :, cache.positions] = key_states[:, :, 0]
        self.values[slots, :, cache.positions] = value_states[:, :, 0]
        rows = slice(len(slots)) if cache.together else slots
        return self.keys[:, :, : cache.width][rows], self.values[:, :, : cache.width][rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions that the queries may see, and the first of them."""
        return self.cache.width, 0

    def get_seq_length(self) -> int:
        """None come before a prefill; a decode brings its own positions and mask."""
        return 0

    def get_max_length(self) -> int:
        return self.cache.slot_len

    def get_max_cache_shape(self) -> int:
        return self.cache.slot_len
