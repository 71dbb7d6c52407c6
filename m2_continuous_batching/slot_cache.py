"""The dense KV cache: one tensor for all requests, with one slot of `max_model_len` tokens per request.

    keys, values  [layers, max_num_seqs, kv_heads, max_len, head_dim]

    slot 0  | k k k k k k k k k . . . . . . . . . . . . . |   a request of 9 tokens
    slot 1  | k k k . . . . . . . . . . . . . . . . . . . |   a request of 3 tokens
    slot 2  | . . . . . . . . . . . . . . . . . . . . . . |   free

A request writes only into its own slot, so no data moves when a request joins or leaves the batch. The cost is the
memory of the dots: reserved, and empty. The class implements transformers' `Cache` interface, so the model's own code
can use it. Before each forward, `plan_prefill` or `plan_decode` sets the slot of each row of the batch. m3 replaces
slots by blocks of a few tokens. TensorRT-LLM calls such a cache contiguous.
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
    """KV of all slots, and the plan of the next forward."""

    def __init__(self, *, loaded_model: LoadedModel, max_num_seqs: int) -> None:
        """Reserve the memory of all slots. Raises `ConfigError` if the device has less."""
        config = loaded_model.model.config
        self.num_slots, self.slot_len = max_num_seqs, loaded_model.max_model_len
        shape = (config.num_hidden_layers, max_num_seqs, config.num_key_value_heads, self.slot_len, head_dim(config))
        self.num_bytes = max_num_seqs * self.slot_len * loaded_model.kv_bytes_per_token
        self._check_memory(loaded_model)
        try:
            self.key_cache = torch.zeros(shape, dtype=loaded_model.dtype, device=loaded_model.device)
            self.value_cache = torch.zeros_like(self.key_cache)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise ConfigError(f"{self._demand()}, which cannot be allocated: {error}") from error
        self.slots = torch.empty(0, dtype=torch.int64)  # the slot of each row of the next forward
        self.positions: Tensor | None = None  # position of each row's new token; None: whole prompts, from 0 on
        self.width = 0  # number of positions of each slot that the forward reads
        self.together = False
        super().__init__(layers=[SlotLayer(self, k, v) for k, v in zip(self.key_cache, self.value_cache, strict=True)])

    def plan_prefill(self, slots: Tensor, longest: int) -> None:
        """Plan a forward of whole prompts for `slots` `[rows]`, padded on the right to `longest` tokens."""
        self.slots, self.positions, self.width, self.together = slots, None, longest, False

    def plan_decode(self, slots: Tensor, positions: Tensor, width: int, *, together: bool) -> None:
        """Plan a forward of one token for each of `slots` `[rows]`, written at `positions` `[rows]`.

        It reads the first `width` positions. `together`: the slots are 0, 1, 2, ..., and their KV is read in place; the
        KV of any other slots is copied into one tensor for the forward.
        """
        self.slots, self.positions, self.width, self.together = slots, positions, width, together

    def clear(self, slot: int, length: int) -> None:
        """Set the first `length` positions of a slot to zero.

        The next request in the slot masks old values: their attention weight is 0. But they are still multiplied by
        that 0, and NaN times 0 is NaN, so a failed request must not leave NaN in the slot.
        """
        self.key_cache[:, slot, :, :length].zero_()
        self.value_cache[:, slot, :, :length].zero_()

    def _demand(self) -> str:
        return f"a KV cache of {self.num_slots:,} slots x {self.slot_len:,} tokens takes {size(self.num_bytes)}"

    def _check_memory(self, loaded: LoadedModel) -> None:
        """Raise `ConfigError`, with the largest sizes that fit, if the cache does not fit."""
        available = available_memory(loaded.device)
        if available is None or self.num_bytes <= available:
            return
        per_token = loaded.kv_bytes_per_token
        remedies = ["execution='per_request'"]
        if (num_seqs := available // (self.slot_len * per_token)) >= 1:
            remedies.insert(0, f"max_num_seqs of at most {num_seqs:,}")
        if (length := available // (self.num_slots * per_token)) >= 2:
            remedies.insert(0, f"max_model_len of at most {length:,}")
        raise ConfigError(
            f"{self._demand()}; {size(available)} of {loaded.device} memory is available. Use {' or '.join(remedies)}"
        )


class SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`, in the interface that transformers' attention calls."""

    def __init__(self, cache: SlotCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.keys: Tensor = keys  # [slots, kv_heads, max_len, head_dim]
        self.values: Tensor = values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values `[rows, kv_heads, new, head_dim]`; return those that the queries attend to.

        A prefill attends only to its own tokens, `[rows, kv_heads, longest, head_dim]`. A decode attends to its slots,
        `[rows, kv_heads, width, head_dim]`.
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
        """Return the number of positions that the queries attend to, and the first of them."""
        return self.cache.width, 0

    def get_seq_length(self) -> int:
        """Return 0: no tokens precede a prefill, and a decode passes its own positions and mask."""
        return 0

    def get_max_length(self) -> int:
        return self.cache.slot_len
