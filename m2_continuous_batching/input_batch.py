"""Input batch: the scheduler's output as rows of token ids and positions, ready to become tensors.

Each row is one request: a whole prompt, or one new token. Rows differ in length, and a tensor has one width, so
`to_tensors` pads them. `padded.py` counts the padding, which is the reason for m3. vLLM: `InputBatch` in
`v1/worker/gpu_input_batch.py`, which is kept across steps there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m2_continuous_batching.scheduler_output import SchedulerOutput


@dataclass(frozen=True)
class InputBatch:
    """One step's rows as parallel lists, which are never modified."""

    req_ids: list[str]
    token_ids: list[list[int]]
    """The new tokens of each row."""
    start_positions: list[int]
    """Position of each row's first new token, which is the number of its tokens with KV."""
    is_prefill: list[bool]
    prompt_lens: list[int]
    """Length of the prompt in a prefill row; 0 in a decode row."""
    block_ids: list[list[int]]
    """KV memory newly allocated to the row's request: its slot in a prefill row, empty in a decode row."""
    num_logits: list[int]
    """Number of the row's last tokens that need logits: 1, or all if prompt logprobs are requested."""

    @property
    def batch_size(self) -> int:
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens in all rows."""
        return sum(map(len, self.token_ids))

    def select(self, rows: Sequence[int]) -> "InputBatch":
        """Return the given rows, in the given order."""
        return InputBatch(
            req_ids=[self.req_ids[i] for i in rows],
            token_ids=[self.token_ids[i] for i in rows],
            start_positions=[self.start_positions[i] for i in rows],
            is_prefill=[self.is_prefill[i] for i in rows],
            prompt_lens=[self.prompt_lens[i] for i in rows],
            block_ids=[self.block_ids[i] for i in rows],
            num_logits=[self.num_logits[i] for i in rows],
        )

    def to_tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(token_ids, attention_mask, positions)`, each int64 `[batch_size, longest row]`, right-padded.

        The mask is 1 for tokens and 0 for padding; the position of padding is 0.
        """
        shape = (self.batch_size, max(map(len, self.token_ids), default=0))
        token_ids = torch.zeros(shape, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        for i, (tokens, start) in enumerate(zip(self.token_ids, self.start_positions, strict=True)):
            token_ids[i, : len(tokens)] = torch.tensor(tokens)
            attention_mask[i, : len(tokens)] = 1
            positions[i, : len(tokens)] = torch.arange(start, start + len(tokens))
        return token_ids.to(device), attention_mask.to(device), positions.to(device)


def prepare_inputs_from_scheduler_output(scheduler_output: SchedulerOutput) -> InputBatch:
    """Return the rows of a step: its prefills in the order of admission, then its decodes."""
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    prompts, num_cached = [request.prompt_token_ids for request in new], len(cached.req_ids)
    needs_all = [request.sampling_params.prompt_logprobs is not None for request in new]
    return InputBatch(
        req_ids=[request.req_id for request in new] + cached.req_ids,
        token_ids=prompts + cached.new_token_ids,
        start_positions=[request.num_computed_tokens for request in new] + cached.num_computed_tokens,
        is_prefill=[True] * len(new) + [False] * num_cached,
        prompt_lens=[len(prompt) for prompt in prompts] + [0] * num_cached,
        block_ids=[request.block_ids for request in new] + cached.new_block_ids,
        num_logits=[len(prompt) if every else 1 for prompt, every in zip(prompts, needs_all, strict=True)]
        + [1] * num_cached,
    )
