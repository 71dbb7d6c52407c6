"""Runs the draft model: it computes the tokens of the target model, and then drafts.

The draft model's KV lies in a storage of its own, at the target's slots. A request that starts from a cached prefix
finds the draft model's KV there as well; allocation, sharing and rollback of slots hold for both models. For this,
the draft model must have KV for every token that has KV in the target. In each step it computes

    1. the tokens that the target computes: prompts, pieces of prompts, the newest token of each decode;
    2. one draft of each request from the last of them, and each further draft from the one before it;
    3. after the verification, the last draft of each request whose drafts were all accepted: its KV is missing.

Each forward runs all requests that need it. SGLang: `StandaloneWorker` (`speculative/standalone_worker.py`); vLLM:
`DraftModelProposer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import draws as stream_draws
from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import LoadedModel
from m1_single_request.sampler import best_tokens, draw
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.config import KVCacheDtype, ModelConfig
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo, metadata_of
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL, SpeculativeConfig
from m5_chunked_prefill_spec.forward_batch import ForwardBatch, OneEach, SomeTokens, one_after_another, ranges
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.rejection_sampler import DRAFT_STREAM, distribution
from m5_chunked_prefill_spec.speculative.spec_info import Drafts


class DraftRunner:
    """Runs the draft model; its only state is the draft model's KV.

    `propose` runs before the target's forward in every step, `follow` after each step that samples tokens.
    """

    def __init__(self, *, loaded_model: LoadedModel, req_to_token_pool: ReqToTokenPool) -> None:
        self.model: Decoder = loaded_model.model
        self.device = loaded_model.device
        self.req_to_token_pool = req_to_token_pool

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Reserve KV memory for `num_blocks` pages, as many as the target has."""
        self.page_size = block_size
        spec = self.model.kv_cache_spec(block_size)
        self.kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_blocks), device=self.device)
        self.model.use_kv(self.kv)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states `[total_tokens, hidden_size]`."""
        return self.model.forward(batch.input_ids, batch.positions, self.kv, batch.attn_metadata)

    def shutdown(self) -> None:
        """Release the KV memory and the model."""
        for name in ("kv", "model"):
            vars(self).pop(name, None)

    def propose(self, batch: ModelWorkerBatch) -> Drafts | None:
        """Compute the new tokens of a step except its drafts, then make the drafts; None for a step without drafts."""
        wanted = np.array(batch.spec_info.num_draft_tokens if batch.spec_info else [0] * len(batch.rids))
        known = batch.new_lens - wanted
        starts = np.cumsum(batch.new_lens) - batch.new_lens
        rows = np.argsort(-wanted, kind="stable")  # most drafts first: later forwards run a prefix of the rows
        drafting = rows[: np.count_nonzero(wanted)]
        draws = draws_of(batch.sampling_info, drafting, wanted[drafting])
        if (known == 1).all():  # one token each: the first forward has the layout of those that follow
            layouts = one_after_another(batch, rows, starts[rows], np.maximum(wanted[rows], 1), self)
            token_ids = torch.from_numpy(batch.input_ids[starts[rows]])
            token_ids, layouts, draws = to_device((token_ids, layouts, draws), self.device)
            hidden, layouts = self._run(token_ids, layouts[0])[: len(drafting)], layouts[1:]
        else:
            layouts = one_after_another(batch, drafting, (starts + known)[drafting], wanted[drafting] - 1, self)
            step = self._known(batch, starts, known), torch.from_numpy(drafting), layouts, draws
            forward_batch, index, layouts, draws = to_device(step, self.device)
            hidden = self._read(forward_batch)[index]
        if not len(drafting):
            return None
        return self._make_drafts(len(batch.rids), drafting, wanted[drafting], layouts, draws, hidden)

    def follow(self, batch: ModelWorkerBatch, drafts: Drafts | None, num_accepted: Sequence[int]) -> None:
        """Compute the KV of the last draft of each request whose drafts were all accepted. `num_accepted`: by row."""
        if drafts is None:
            return
        counts = np.array([len(own) for own in drafts.token_ids])
        rows = np.flatnonzero((counts > 0) & (np.array(num_accepted) == counts))
        if len(rows):
            places = np.cumsum(batch.new_lens)[rows] - 1
            layouts = one_after_another(batch, rows, places, np.ones_like(rows), self)
            token_ids, (layout,) = to_device((torch.from_numpy(batch.input_ids[places]), layouts), self.device)
            self._run(token_ids, layout)

    def _make_drafts(
        self,
        batch_size: int,
        rows: np.ndarray,
        counts: np.ndarray,
        layouts: Sequence[OneEach],
        draws: Sequence[SamplingMetadata],
        hidden: Tensor,
    ) -> Drafts:
        """Make `counts[i]` drafts for row `rows[i]`, in falling order of `counts`; `hidden[i]` gives the first one.

        The drafts are copied to the host once, after the last forward.
        """
        chosen: list[Tensor] = []
        probs: list[list[Tensor]] = [[] for _ in range(batch_size)]
        for offset in range(int(counts[0])):
            logits = self.model.compute_logits(hidden)
            newest, drawn_from = choose(logits, draws[offset] if draws else None)
            chosen.append(newest)
            if drawn_from is not None:
                for row, row_probs in zip(rows[counts > offset].tolist(), drawn_from, strict=True):
                    probs[row].append(row_probs)
            if offset < len(layouts):
                hidden = self._run(newest, layouts[offset])
        made = iter(torch.cat(chosen).tolist())
        token_ids: list[list[int]] = [[] for _ in range(batch_size)]
        for offset in range(int(counts[0])):
            for row in rows[counts > offset].tolist():
                token_ids[row].append(next(made))
        flat = [draft_probs for own in probs for draft_probs in own]
        return Drafts(token_ids, torch.stack(flat) if flat else None)

    def _run(self, token_ids: Tensor, layout: OneEach) -> Tensor:
        """Run one token of each row of the layout, the first of `token_ids`; return `[rows, hidden_size]`."""
        positions, metadata = layout
        return self.model.forward(token_ids[: len(positions)], positions, self.kv, metadata)

    def _known(self, batch: ModelWorkerBatch, starts: np.ndarray, counts: np.ndarray) -> ForwardBatch:
        """Return the first `counts[i]` new tokens of each row `i`, from which the last hidden states are needed."""
        places = ranges(starts, counts)
        tokens = SomeTokens(
            input_ids=batch.input_ids[places],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens - batch.new_lens + counts,
            new_lens=counts,
            out_cache_loc=batch.out_cache_loc[places],
            sample_lens=[1] * len(counts),
        )
        return ForwardBatch.init_new(tokens, self)

    def _read(self, batch: ForwardBatch) -> Tensor:
        """Run a batch; return `[rows, hidden_size]` of the last token of each row."""
        hidden = self.forward(batch)
        return hidden if batch.logits_indices is None else hidden[batch.logits_indices]


def draws_of(info: SamplingBatchInfo, rows: np.ndarray, counts: np.ndarray) -> tuple[SamplingMetadata, ...]:
    """Return the sampling parameters of the first draft of each of `rows`, of the second drafts, ...

    `counts[i]` is the number of drafts of `rows[i]`, in falling order. Empty if all are greedy. Penalties and bias are
    left out: they change which drafts are accepted, not the distribution of the output.
    """
    found: list[SamplingMetadata] = []
    if info.numbers["greedy"][rows].all():
        return ()
    for offset in range(int(counts[0])):
        active = rows[counts > offset]
        seeds, positions = [info.seeds[i] for i in active], (info.positions[active] + offset).tolist()
        numbers = info.numbers[active]  # a copy
        numbers["penalised"] = False
        metadata = metadata_of(
            numbers,
            num_logprobs=None,
            vocab_size=info.vocab_size,
            uniforms=torch.from_numpy(stream_draws(seeds, positions, DRAFT_STREAM)),
            bias=None,
            seen=None,
            output_counts=None,
        )
        found.append(metadata)
    return tuple(found)


def choose(logits: Tensor, draws: SamplingMetadata | None) -> tuple[Tensor, Tensor | None]:
    """Choose a draft for each row of `logits`, int64 `[rows]`: the most likely token, or a draw if the row draws.

    Also returns the distributions of the draws, float32 `[rows, vocab]`; None without `draws`: all rows are greedy.
    """
    best = best_tokens(logits)
    if draws is None:
        return best, None
    assert draws.uniforms is not None
    probs = distribution(logits.float(), draws)
    return torch.where(draws.greedy, best, draw(probs, draws.uniforms)), probs


def load_draft_model(
    load: Callable[..., LoadedModel],
    config: ModelConfig,
    kv_cache_dtype: KVCacheDtype,
    speculative: SpeculativeConfig,
    target: LoadedModel,
    *,
    default_models: Sequence[str | Path],
) -> LoadedModel | None:
    """Load the draft model of the configuration in the target's precision; None without `method="draft_model"`.

    `kv_cache_dtype`: format of its KV, the same as the target's. `default_models`: the targets for which the embedded
    draft model was trained. Raises `ModelLoadError`, and `ConfigError` for a draft model with another vocabulary than
    the target's.
    """
    if speculative.method != "draft_model":
        return None
    if speculative.model is None and config.model is not None and Path(config.model) not in default_models:
        raise ConfigError(
            f"the embedded draft model belongs to the default model, not to {target.name}: name one in "
            f"SpeculativeConfig(model=...)"
        )
    path = speculative.model or DEFAULT_DRAFT_MODEL
    precision = str(target.dtype).removeprefix("torch.")
    own = replace(config, model=path, dtype=precision)  # of the length that is named, or its own
    draft = load(own, kv_cache_dtype=kv_cache_dtype)
    check_vocabulary(draft, target)
    return draft


def check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise `ConfigError` if a token id does not stand for the same token in both models."""
    if draft.vocab_size != target.vocab_size or draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        sizes = f"{draft.vocab_size:,} and {target.vocab_size:,} ids"
        raise ConfigError(f"{draft.name} cannot draft for {target.name}: their vocabularies differ ({sizes})")


def limited(target: Any, draft: LoadedModel | None) -> Any:
    """Return the target with a `max_model_len` of at most the draft model's, which computes every token as well."""
    if draft is None or draft.max_model_len >= target.max_model_len:
        return target
    return replace(target, max_model_len=draft.max_model_len)
