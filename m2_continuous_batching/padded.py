"""Padded execution: run a batch in two forwards, one for all prefills of the step, one for all decodes.

Each forward reads every weight once for all of its rows, which is the gain of batching. The cost is padding, and this
file counts it:

- a prefill batch is as wide as its longest prompt, `[rows, longest]`;
- a decode batch has one column, and its rows are the slots from 0 to the highest that decodes. A slot below it that
  does not decode is an idle row: without it the KV of all other slots would be copied. If fewer than half of the slots
  decode, the KV is copied, without idle rows;
- attention reads every row up to the length of the longest one.
"""

import torch
from torch import Tensor

from m1_single_request.events import Free
from m1_single_request.model_loader import LoadedModel
from m1_single_request.tracer import Tracer
from m2_continuous_batching.events import Forward
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.packed_linear import pack_linears
from m2_continuous_batching.slot_cache import SlotCache


class PaddedExecution:
    """Runs transformers' own model with a `SlotCache`."""

    def __init__(self, *, loaded_model: LoadedModel, max_num_seqs: int, tracer: Tracer) -> None:
        self.model = loaded_model.model
        pack_linears(self.model)
        self.decoder, self.lm_head = self.model.get_decoder(), self.model.get_output_embeddings()
        self.device, self.dtype = loaded_model.device, loaded_model.dtype
        self.kv_bytes_per_token = loaded_model.kv_bytes_per_token
        self.tracer = tracer
        self.cache = SlotCache(loaded_model=loaded_model, max_num_seqs=max_num_seqs)
        self.slots: dict[str, int] = {}  # request id -> slot, for each started request
        self.lens = [0] * max_num_seqs  # tokens with KV of the request in each slot
        self.written = [0] * max_num_seqs  # positions of each slot that may be non-zero, padding included
        self.num_padded = 0

    def execute(self, batch: InputBatch) -> dict[str, Tensor]:
        """Run all rows, and return the logits by request id: float32 `[num_logits, vocab]`."""
        for request_id, block_ids in zip(batch.req_ids, batch.block_ids, strict=True):
            if block_ids:  # sent once, at the request's first step; the runner stores the slot
                (slot,) = block_ids
                assert self.slots.get(request_id, slot) == slot and slot not in self._slots_of_others(request_id)
                self.slots[request_id] = slot
        self.num_padded = 0
        prefills = [row for row, is_prefill in enumerate(batch.is_prefill) if is_prefill]
        decodes = [row for row, is_prefill in enumerate(batch.is_prefill) if not is_prefill]
        logits = self._prefill(batch.select(prefills)) if prefills else {}
        return logits | (self._decode(batch.select(decodes)) if decodes else {})

    def free(self, request_id: str) -> None:
        """Clear the slot of a request. Slots are allocated by the scheduler's KV manager, not here."""
        slot = self.slots.get(request_id)
        if slot is None:
            return
        tokens = self.lens[slot]
        self.cache.clear(slot, self.written[slot])
        self.lens[slot] = self.written[slot] = 0
        del self.slots[request_id]
        self.tracer.emit(Free, owner=request_id, tokens=tokens, bytes=tokens * self.kv_bytes_per_token)

    def clear(self) -> None:
        """Free all slots, and set their KV to zero."""
        written, self.written = self.written, [0] * len(self.written)
        self.lens = [0] * len(self.lens)
        self.slots.clear()
        for slot, length in enumerate(written):
            self.cache.clear(slot, length)

    def lengths(self) -> dict[str, int]:
        """Return the number of tokens with KV by request id."""
        return {request_id: self.lens[slot] for request_id, slot in self.slots.items()}

    def reserved_bytes(self) -> int:
        """Return the bytes of all slots; they are reserved from the start, in full length."""
        return self.cache.num_bytes

    def _slots_of_others(self, request_id: str) -> list[int]:
        return [slot for owner, slot in self.slots.items() if owner != request_id]

    def _prefill(self, batch: InputBatch) -> dict[str, Tensor]:
        """Run whole prompts, padded on the right: no token attends to padding, and its logits are not computed."""
        token_ids, _, positions = batch.to_tensors(self.device)
        longest = token_ids.shape[1]
        slots = [self.slots[request_id] for request_id in batch.req_ids]
        for slot in slots:
            self.written[slot] = max(self.written[slot], longest)
        self.cache.plan_prefill(torch.tensor(slots, device=self.device), longest)
        hidden = self._forward(token_ids, positions, None)  # [rows, longest, hidden_size]
        rows: list[int] = []
        columns: list[int] = []
        for row, (length, num_logits) in enumerate(zip(batch.prompt_lens, batch.num_logits, strict=True)):
            rows += [row] * num_logits
            columns += range(length - num_logits, length)
            self.lens[slots[row]] = length
        logits = self.lm_head(hidden[rows, columns]).float()  # [sum of num_logits, vocab]
        self._count("prefill", batch, num_rows=len(slots), width=longest, kv_width=longest)
        return dict(zip(batch.req_ids, logits.split(batch.num_logits), strict=True))

    def _decode(self, batch: InputBatch) -> dict[str, Tensor]:
        """Run one token per row. An idle row writes after its slot's last token, where the next token overwrites it."""
        slots = [self.slots[request_id] for request_id in batch.req_ids]
        together = 2 * len(slots) >= max(slots) + 1
        rows = list(range(max(slots) + 1)) if together else slots  # the slot of each row of the forward
        places = slots if together else range(len(slots))  # the row of each request
        token_ids, positions = [0] * len(rows), [self.lens[slot] for slot in rows]
        for place, tokens, start in zip(places, batch.token_ids, batch.start_positions, strict=True):
            token_ids[place], positions[place] = tokens[0], start
        for slot, position in zip(rows, positions, strict=True):
            self.written[slot] = max(self.written[slot], position + 1)
        width = max(batch.start_positions) + 1
        where = torch.tensor(positions, device=self.device)
        self.cache.plan_decode(torch.tensor(rows, device=self.device), where, width, together=together)
        mask = self._decode_mask(where, width)
        hidden = self._forward(torch.tensor(token_ids, device=self.device)[:, None], where[:, None], mask)
        logits = self.lm_head(hidden[:, 0]).float()  # [rows, vocab]
        for slot, start in zip(slots, batch.start_positions, strict=True):
            self.lens[slot] = start + 1
        self._count("decode", batch, num_rows=len(rows), width=1, kv_width=width)
        return {request_id: logits[place : place + 1] for request_id, place in zip(batch.req_ids, places, strict=True)}

    def _decode_mask(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Return the attention mask `[rows, 1, 1, width]`: 0 up to each row's position, minus infinity after it.

        A model with sliding-window layers gets one mask per type of layer.
        """
        columns = torch.arange(width, device=self.device)
        hidden = columns > positions[:, None]

        def mask(hidden: Tensor) -> Tensor:
            zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            return zeros.masked_fill_(hidden, -torch.inf)[:, None, None]

        config = self.model.config
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return mask(hidden)
        out_of_window = columns <= positions[:, None] - config.sliding_window
        return {"full_attention": mask(hidden), "sliding_attention": mask(hidden | out_of_window)}

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None) -> Tensor:
        """Return the last hidden states `[rows, new, hidden_size]`. If `mask` is None, the model uses a causal mask."""
        output = self.decoder(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _count(self, mode: str, batch: InputBatch, *, num_rows: int, width: int, kv_width: int) -> None:
        """Count and trace the padding of one forward: tensor positions without a token."""
        padded = num_rows * width - batch.num_tokens
        self.num_padded += padded
        self.tracer.emit(
            Forward,
            mode=mode,
            num_requests=batch.batch_size,
            num_rows=num_rows,
            width=width,
            useful_tokens=batch.num_tokens,
            padded_tokens=padded,
            kv_read=num_rows * kv_width,
            kv_needed=sum(batch.start_positions) + batch.num_tokens,
        )
