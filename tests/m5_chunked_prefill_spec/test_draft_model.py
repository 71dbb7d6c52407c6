"""The draft model beside the target: its KV is always where the target's is, and what it draws changes no distribution.

Its KV lies at the target's slots. So for every slot with KV of the target, of a running request or of a cached page,
there must be what the draft model computes for these tokens if it reads them in one go. Guesses would come from a
wrong past otherwise: no answer would change, and nobody would notice but by the acceptance.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.kv_storage import KVStorage
from m5_chunked_prefill_spec import CacheConfig, LLMEngine, SamplingParams, SpeculativeConfig
from m5_chunked_prefill_spec.forward_batch import ForwardBatch, SomeTokens
from m5_chunked_prefill_spec.speculative.speculation import Speculation
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.equivalence.traffic import prompt_of
from tests.m5_chunked_prefill_spec.cached import cached_paths
from tests.m5_chunked_prefill_spec.engines import (
    MakeEngine,
    Remembered,
    check_answers,
    check_flushed,
    check_step,
    greedy,
    ids,
    run,
    runner_of,
    scheduler_of,
    setting,
)

LENGTH = 16


# --- in step ----------------------------------------------------------------------------------------------------------


class Fresh:
    """What the draft model computes for tokens that it reads in one go, in a memory of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model, self.device, self.page_size = loaded.model, loaded.device, 1
        self.req_to_token_pool: Any = self
        self.known: list[tuple[list[int], Tensor]] = []

    def page_tables(self, rows: Any, num_tokens: int, page_size: int) -> np.ndarray:
        """Its one row: slots 1, 2, 3, ..."""
        return np.arange(1, num_tokens + 1, dtype=np.int32)[None]

    def kv_of(self, tokens: list[int]) -> Tensor:
        """Keys and values of all layers, as `kv_at`. What comes later changes nothing of it, so longer ones serve."""
        for known, kv in self.known:
            if known[: len(tokens)] == tokens:
                return kv[:, :, : len(tokens)]
        slots = np.arange(1, len(tokens) + 1)
        storage = KVStorage(KVCacheConfig(spec=self.model.kv_cache_spec(1), num_blocks=len(tokens)), device=self.device)
        one = SomeTokens(
            input_ids=np.array(tokens),
            req_pool_indices=np.array([0]),
            seq_lens=np.array([len(tokens)]),
            new_lens=np.array([len(tokens)]),
            out_cache_loc=slots,
            sample_lens=[1],
        )
        batch = ForwardBatch.init_new(one, self)
        with torch.inference_mode():
            self.model.forward(batch.input_ids, batch.positions, storage, batch.attn_metadata)
        self.known.append((tokens, kv_at(storage, slots)))
        return self.known[-1][1]


def kv_at(storage: KVStorage, slots: Any) -> Tensor:
    """What stands at these slots: `[layers, 2, slots, kv_heads, head_dim]`."""
    layers = [storage.layer(i) for i in range(storage.config.spec.num_layers)]
    return torch.stack([torch.stack([part.flatten(0, 1)[slots] for part in layer[:2]]) for layer in layers])


def check_in_step(engine: LLMEngine, fresh: Fresh) -> int:
    """Of everybody who runs, and of all that is cached: the draft's KV is that of a forward over these tokens.

    Returns how many tokens were looked at.
    """
    scheduler, storage = scheduler_of(engine), runner_of(engine).draft_runner.kv
    rows = scheduler.pools.req_to_token_pool
    held = cached_paths(engine)
    for req in scheduler.running:
        slots = rows.read(req.req_pool_idx, 0, req.kv_committed_len).tolist()
        held.append(((req.origin_input_ids + req.output_ids)[: req.kv_committed_len], slots))
    for tokens, slots in sorted(held, key=lambda one: -len(one[0])):
        assert len(tokens) == len(slots)
        if tokens:
            found, wanted = kv_at(storage, slots), fresh.kv_of(tokens)
            assert torch.allclose(found, wanted, atol=1e-4), f"out of step over {tokens}"
    return sum(len(tokens) for tokens, _ in held)


@pytest.fixture(scope="module")
def fresh(loaded_draft: LoadedModel) -> Fresh:
    return Fresh(loaded_draft)


def step_through(engine: LLMEngine, asked: Mapping[str, tuple[list[int], SamplingParams, bool]], fresh: Fresh) -> Any:
    """A request joins with every second step; the last outputs. The draft's KV is looked at after every step."""
    waiting, last, looked_at = list(asked.items()), {}, 0
    while waiting or engine.has_unfinished_requests():
        for rid, (prompt, params, speculate) in waiting[:1]:
            engine.add_request(prompt, params, request_id=rid, speculate=speculate)
        del waiting[:1]
        for _ in range(2):
            last |= engine.step()
            check_step(engine)
            looked_at += check_in_step(engine, fresh)
    assert looked_at > 1000
    return last


def traffic(**params: Any) -> dict[str, tuple[list[int], SamplingParams, bool]]:
    """Prompts that begin alike, some long; the third of them is not guessed for."""
    lengths = (7, 23, 40, 16, 33)
    return {
        str(i): (prompt_of(length, i % 2), greedy(LENGTH + i, **params), i != 2) for i, length in enumerate(lengths)
    }


class EveryThirdStep(Speculation):
    """Guesses in every third step only. In the others the draft model reads the tokens of the target, too."""

    num_steps = 0

    def propose(self, reqs: Any, max_draft_tokens: int) -> list[list[int]]:
        self.num_steps += 1
        return super().propose(reqs, max_draft_tokens) if self.num_steps % 3 == 0 else []


LIMITS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 17},
    {"max_num_batched_tokens": 32, "schedule": "prefill_first"},
    {"chunked_prefill_size": 5, "drafts": 7},
    {"drafts": 1},
    {"parts": {"scheduler": ForcedRetractionInPieces}, "max_num_batched_tokens": 24, "tokens": 208},
    {"parts": {"speculation": EveryThirdStep}},
]


@pytest.mark.sample(7)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_drafts_kv_is_where_the_targets_is_after_every_step(
    make_engine: MakeEngine, m1: Remembered, fresh: Fresh, page_size: int, limits: dict[str, Any]
) -> None:
    """Through pieces and mixed steps, right and wrong guesses, retractions, and hits on the KV of earlier requests."""
    own = {name: value for name, value in limits.items() if name != "parts"}
    engine = make_engine(limits.get("parts"), **setting(8, page_size=page_size, method="draft_model", **own))
    for _ in range(2):
        asked = traffic()
        outputs = step_through(engine, asked, fresh)
        check_answers(outputs, m1, {rid: (prompt, params) for rid, (prompt, params, _) in asked.items()})
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_cached_tokens > 0
    assert (stats.num_retractions > 2) == ("tokens" in limits)
    check_flushed(engine)


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_it_catches_up_when_all_guesses_were_right(
    make_engine: MakeEngine, loaded: LoadedModel, tiny_directory: Path, page_size: int, drafts: int
) -> None:
    """The target itself guesses: nothing is ever wrong, and of the last guess of each step the draft has no KV yet."""
    limits = setting(8, page_size=page_size, method="draft_model", drafts=drafts, draft_model=tiny_directory)
    engine = make_engine(**limits)
    step_through(engine, traffic(), Fresh(loaded))
    assert engine.stats().acceptance_rate == 1


def test_drawn_guesses_are_in_step_as_well(make_engine: MakeEngine, fresh: Fresh) -> None:
    engine = make_engine(**setting(8, method="draft_model", max_num_batched_tokens=20))
    step_through(engine, traffic(temperature=0.8, top_k=6, seed=4, frequency_penalty=0.4), fresh)
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens
    check_flushed(engine)


def test_what_was_decided_is_not_changed_by_the_runner(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays of a step are the scheduler's own: the guesses go into a copy."""
    engine = make_engine(**setting(method="draft_model"))
    executor, changes = engine.engine_core.executor, list[tuple[bool, bool]]()
    execute = executor.execute_model

    def watched(batch: Any) -> Any:
        before = batch.input_ids.copy()
        output = execute(batch)
        changes.append((bool((before < 0).any()), bool((batch.input_ids != before).any())))
        return output

    monkeypatch.setattr(executor, "execute_model", watched)
    engine.generate(prompt_of(12), greedy(9))
    assert set(changes) == {(False, False), (True, False)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_always_right(
    make_engine: MakeEngine, tiny_directory: Path, temperature: float
) -> None:
    """The request with most guesses is not the first one: guesses, and what they were drawn from, must not change
    owners."""
    engine = make_engine(**setting(4, method="draft_model", draft_model=tiny_directory, drafts=7))
    for number, max_tokens in enumerate((3, 12, 1, 7)):
        params = greedy(max_tokens, temperature=temperature, seed=number)
        engine.add_request(ids(4 + number, 50 * number + 5), params)
    run(engine)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 1 + 7 + 2 + 5


def test_the_draft_model_s_kv_has_the_target_s_format_and_is_counted() -> None:
    speculation, cache = (
        SpeculativeConfig(method="draft_model"),
        CacheConfig(max_total_tokens=64, kv_cache_dtype="int8"),
    )
    with LLMEngine(cache_config=cache, speculative_config=speculation) as engine:
        runner = runner_of(engine)
        storages = runner.kv, runner.draft_runner.kv
        assert [storage.layer(0).key_cache.dtype for storage in storages] == [torch.int8] * 2
        pages = sum(storage.blocks[:, 0].nbytes for storage in storages)
        assert engine.engine_core.executor.kv_cache_spec(16).block_bytes == pages
