"""The draft model on the device: it reads everything that the target reads, and runs ahead where it is asked to.

Its KV lies in a storage of its own, at the target's slots: token for token, page for page. So whoever starts from a
cached prefix finds the draft's KV there as well, and what is freed, shared or moved for the target needs no second
book. For that its KV must never fall behind. In every step it computes

    1. whatever the target computes anyway: prompts, pieces of them, everybody's newest token;
    2. a guess from each, and from that the next one, as many as the step has slots for;
    3. after the verification, the last guess of those whose guesses were all right: nobody has computed its KV yet.

All requests together each time, whatever each needs. SGLang: `StandaloneWorker` (`speculative/standalone_worker.py`);
vLLM: `DraftModelProposer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.draws import draws as stream_draws
from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import LoadedModel
from m1_single_request.sampler import best_tokens, draw
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.kv_cache_config import KVCacheConfig
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.profiling import kv_cache_spec_of
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo, metadata_of
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import milliseconds
from m5_chunked_prefill_spec.forward_batch import (
    ForwardBatch,
    OneEach,
    SomeTokens,
    nothing_in_page_0,
    one_after_another,
    ranges,
)
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.rejection_sampler import DRAFT_STREAM, distribution
from m5_chunked_prefill_spec.speculative.spec_info import Drafts


class DraftRunnerProtocol(Protocol):
    """Whatever makes guesses beside the model. `propose` comes before the target's forward in every step, `follow`
    after its sampling, with the batch that has the guesses in it; not where nothing is sampled, for want of guesses."""

    kv_bytes_per_token: int

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None: ...
    def cost_of(self, num_rows: int) -> float: ...
    def propose(self, batch: ModelWorkerBatch) -> Drafts | None: ...
    def follow(self, batch: ModelWorkerBatch, drafts: Drafts | None, num_accepted: Sequence[int]) -> None: ...
    def shutdown(self) -> None: ...


class DraftRunner:
    """Runs the draft model; remembers nothing but its KV."""

    def __init__(self, *, loaded_model: LoadedModel, req_to_token_pool: ReqToTokenPool) -> None:
        self.model: Decoder = loaded_model.model
        self.device = loaded_model.device
        self.req_to_token_pool = req_to_token_pool
        self.kv_bytes_per_token = loaded_model.kv_bytes_per_token

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Reserve as many pages as the target has."""
        self.page_size = block_size
        spec = kv_cache_spec_of(self.model, block_size)
        self.kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_blocks), device=self.device)

    def cost_of(self, num_rows: int) -> float:
        """Milliseconds of a guess for each of so many requests."""
        tokens = nothing_in_page_0(num_rows, 1, 0, self.page_size)

        def run() -> None:
            best_tokens(self.model.compute_logits(self.forward(ForwardBatch.init_new(tokens, self)))).tolist()

        return milliseconds(run)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[total_tokens, hidden_size]`."""
        return self.model.forward(batch.input_ids, batch.positions, self.kv, batch.attn_metadata)

    def shutdown(self) -> None:
        """Let go of the KV memory and the model."""
        for name in ("kv", "model"):
            vars(self).pop(name, None)

    def propose(self, batch: ModelWorkerBatch) -> Drafts | None:
        """Compute the new tokens of a step, all but the guesses, and make these. None if the step has none."""
        wanted = np.array(batch.spec_info.num_draft_tokens if batch.spec_info else [0] * len(batch.rids))
        known = batch.new_lens - wanted
        starts = np.cumsum(batch.new_lens) - batch.new_lens
        rows = np.argsort(-wanted, kind="stable")  # most guesses first: those who go on are always the first ones
        guessing = rows[: np.count_nonzero(wanted)]
        if (known == 1).all():  # the newest token of each is the first link of its chain
            first, *layouts = one_after_another(batch, rows, starts[rows], np.maximum(wanted[rows], 1), self)
            hidden = self._run(batch.input_ids[starts[rows]], first)[: len(guessing)]
        else:
            hidden = self._read(batch, starts, known)[torch.from_numpy(guessing).to(self.device)]
            firsts = (starts + known)[guessing]
            layouts = one_after_another(batch, guessing, firsts, wanted[guessing] - 1, self)
        if not len(guessing):
            return None
        return self._guess(batch.sampling_info, guessing, wanted[guessing], layouts, hidden)

    def follow(self, batch: ModelWorkerBatch, drafts: Drafts | None, num_accepted: Sequence[int]) -> None:
        """Compute the last guess of every request whose guesses were all right. `num_accepted`: by row."""
        if drafts is None:
            return
        counts = np.array([len(own) for own in drafts.token_ids])
        rows = np.flatnonzero((counts > 0) & (np.array(num_accepted) == counts))
        if len(rows):
            places = np.cumsum(batch.new_lens)[rows] - 1
            (layout,) = one_after_another(batch, rows, places, np.ones_like(rows), self)
            self._run(batch.input_ids[places], layout)

    def _guess(
        self, info: SamplingBatchInfo, rows: np.ndarray, counts: np.ndarray, layouts: Sequence[OneEach], hidden: Tensor
    ) -> Drafts:
        """`counts[i]` guesses for `rows[i]`, most first, the first of them behind `hidden[i]`. They stay on the device
        until all are made."""
        is_drawn = not info.numbers[rows]["greedy"].all()
        chosen: list[Tensor] = []
        probs: list[list[Tensor]] = [[] for _ in info.seeds]
        for offset in range(int(counts[0])):
            going_on = rows[counts > offset]
            logits = self.model.compute_logits(hidden)
            newest, drawn_from = self._choose(logits, info, going_on, offset, is_drawn=is_drawn)
            chosen.append(newest)
            if drawn_from is not None:
                for row, of_row in zip(going_on.tolist(), drawn_from, strict=True):
                    probs[row].append(of_row)
            if offset < len(layouts):
                hidden = self._run(newest, layouts[offset])
        said = iter(torch.cat(chosen).tolist())
        token_ids: list[list[int]] = [[] for _ in info.seeds]
        for offset in range(int(counts[0])):
            for row in rows[counts > offset].tolist():
                token_ids[row].append(next(said))
        flat = [of_guess for own in probs for of_guess in own]
        return Drafts(token_ids, torch.stack(flat) if flat else None)

    def _run(self, token_ids: Tensor | np.ndarray, layout: OneEach) -> Tensor:
        """One token of each row, of `token_ids` as many as the layout has: hidden states `[rows, hidden_size]`."""
        positions, metadata = layout
        token_ids = torch.as_tensor(token_ids, device=self.device)[: len(positions)]
        return self.model.forward(token_ids, positions, self.kv, metadata)

    def _read(self, batch: ModelWorkerBatch, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        """Run the first `counts[i]` of the new tokens of each row; hidden states of the last ones, by row."""
        where = ranges(starts, counts)
        tokens = SomeTokens(
            input_ids=batch.input_ids[where],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens - batch.new_lens + counts,
            new_lens=counts,
            out_cache_loc=batch.out_cache_loc[where],
            sample_lens=[1] * len(counts),
        )
        laid_out = ForwardBatch.init_new(tokens, self)
        hidden = self.forward(laid_out)
        return hidden if laid_out.logits_indices is None else hidden[laid_out.logits_indices]

    def _choose(
        self, logits: Tensor, info: SamplingBatchInfo, rows: np.ndarray, offset: int, *, is_drawn: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A guess for each row, int64 `[rows]`: the best token for greedy requests, else a draw as hot as the target's.

        Penalties and bias are left out: a worse guess, never a wrong answer. With it what it was drawn from, float64
        `[rows, vocab]`, if any in the step is.
        """
        best = best_tokens(logits)
        numbers = info.numbers[rows]
        if not is_drawn:
            return best, None
        plain = numbers.copy()
        plain["penalised"] = False
        metadata = metadata_of(
            plain,
            num_logprobs=(None,) * len(rows),
            vocab_size=logits.shape[-1],
            device=logits.device,
            uniforms=None,
            bias=None,
            seen=None,
            output_counts=None,
        )
        probs = distribution(logits.float(), metadata)
        seeds = [info.seeds[i] for i in rows]
        numbers_drawn = stream_draws(seeds, (info.positions[rows] + offset).tolist(), DRAFT_STREAM)
        drawn = draw(probs, torch.from_numpy(numbers_drawn).to(probs.device))
        greedy = torch.from_numpy(numbers["greedy"].copy()).to(logits.device)
        return torch.where(greedy, best, drawn), probs


def load_draft_model(
    load: Callable[[ModelConfig], LoadedModel],
    config: ModelConfig,
    speculative: SpeculativeConfig,
    target: LoadedModel,
    default_models: Sequence[str | Path] = (DEFAULT_MODEL,),
) -> LoadedModel | None:
    """The draft model that the configuration names, in the target's precision; None if there is to be none.

    `default_models`: those that the draft model which ships belongs to. Raises `ModelLoadError`, or `ConfigError` if it
    cannot guess for this target: the same token ids must mean the same.
    """
    if speculative.method != "draft_model":
        return None
    if speculative.model is None and config.model is not None and Path(config.model) not in default_models:
        raise ConfigError(
            f"the draft model that ships belongs to the default model, not to {target.name}: name one in "
            f"SpeculativeConfig(model=...)"
        )
    path = speculative.model or DEFAULT_DRAFT_MODEL
    precision = str(target.dtype).removeprefix("torch.")
    draft = load(replace(config, model=path, dtype=precision))  # of the length that is named, or its own
    if draft.vocab_size != target.vocab_size or draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigError(
            f"{draft.name} cannot guess for {target.name}: their vocabularies differ ({draft.vocab_size:,} and "
            f"{target.vocab_size:,} ids)"
        )
    return draft


def limited(target: Any, draft: LoadedModel | None) -> Any:
    """The target, for requests of no more tokens than the draft model takes: it reads all of them."""
    if draft is None or draft.max_model_len >= target.max_model_len:
        return target
    return replace(target, max_model_len=draft.max_model_len)
