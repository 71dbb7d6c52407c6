"""The padded execution: the logits are those of each request alone, whatever the slots beside it hold.

The same tokens go through the batch and, request by request, through m1's runner. No scheduler decides here: slots are
taken, skipped, left idle and used again as no scheduler would do it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from m1_single_request import ModelConfig
from m1_single_request.model_loader import LoadedModel, load_model
from m1_single_request.model_runner import ModelInputs, ModelRunner as SingleRequestRunner
from m2_continuous_batching import ConfigError, LLMEngine, SamplingParams, SchedulerConfig, Tracer, slot_cache
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.padded import PaddedExecution
from tests.engine_contract.variants import failing_layer
from tests.equivalence.harness import ReferenceModel, compare
from tests.equivalence.models import save_random_model
from tests.m2_continuous_batching.engines import MakeEngine, Recorder, greedy, limits

VOCAB = 4096
CLOSE = 1e-4


class SideBySide:
    """The padded runner and m1's, fed with the same tokens; every step compares their logits."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        self.tracer = Tracer()
        self.recorder = Recorder(self.tracer)
        config = SchedulerConfig(max_num_seqs=num_slots).resolved(loaded.max_model_len)
        self.runner = ModelRunner(loaded_model=loaded, scheduler_config=config, tracer=self.tracer)
        self.alone = SingleRequestRunner(loaded_model=loaded, tracer=Tracer())
        assert isinstance(self.runner.execution, PaddedExecution)
        self.padded = self.runner.execution
        self.lens: dict[str, int] = {}

    def step(
        self,
        prompts: Mapping[str, tuple[int, list[int]]] | None = None,
        decodes: Mapping[str, int] | None = None,
        *,
        all_logits: Iterable[str] = (),
    ) -> dict[str, Tensor]:
        """Run prompts (by id: slot and tokens) and decodes (by id: the token); returns the logits, compared."""
        prompts, decodes = prompts or {}, decodes or {}
        ids, tokens = [*prompts, *decodes], [*(p for _, p in prompts.values()), *([t] for t in decodes.values())]
        starts = [0] * len(prompts) + [self.lens[rid] for rid in decodes]
        num_logits = [len(p) if rid in all_logits else 1 for rid, p in zip(ids, tokens, strict=True)]
        batch = InputBatch(
            req_ids=ids,
            token_ids=tokens,
            start_positions=starts,
            is_prefill=[True] * len(prompts) + [False] * len(decodes),
            prompt_lens=[len(p) for _, p in prompts.values()] + [0] * len(decodes),
            block_ids=[[slot] for slot, _ in prompts.values()] + [[] for _ in decodes],
            num_logits=num_logits,
        )
        with torch.inference_mode():
            logits = self.runner.execute_model_batch(batch)
        assert list(logits) == ids
        for rid, new, start, wanted in zip(ids, tokens, starts, num_logits, strict=True):
            positions = torch.arange(start, start + len(new))[None]
            alone = self.alone.execute_model(ModelInputs(rid, torch.tensor([new]), positions, start, wanted))[rid]
            assert logits[rid].shape == alone.shape and logits[rid].dtype == torch.float32
            torch.testing.assert_close(
                logits[rid], alone, atol=CLOSE, rtol=0, msg=lambda said, rid=rid: f"{rid}: {said}"
            )
            self.lens[rid] = start + len(new)
        assert self.padded.lengths() == self.lens
        return logits

    def free(self, rid: str) -> None:
        """Let a request leave."""
        self.runner.free_request_cache(rid)
        self.alone.free_request_cache(rid)
        del self.lens[rid]

    def kv(self, slot: int) -> Tensor:
        """A copy of all that stands in a slot."""
        return torch.stack([self.padded.cache.key_cache[:, slot], self.padded.cache.value_cache[:, slot]]).clone()

    def forwards(self) -> list[Any]:
        """The forwards since the last look."""
        found = self.recorder.events("forward")
        self.recorder.records.clear()
        return found


@pytest.fixture
def pair(loaded_m1: LoadedModel) -> SideBySide:
    """Eight slots."""
    return SideBySide(loaded_m1, 8)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """Some tokens."""
    rng = Random(f"{length}/{seed}")
    return [rng.randrange(VOCAB) for _ in range(length)]


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_each_request_alone(loaded_m1: LoadedModel, seed: int) -> None:
    rng, pair, seen = Random(seed), SideBySide(loaded_m1, 8), Counter[str]()
    slots: dict[str, int] = {}
    used: set[int] = set()
    for step in range(40):
        for rid in [rid for rid in slots if rng.random() < 0.12]:
            pair.free(rid)
            del slots[rid]
        free = [slot for slot in range(8) if slot not in slots.values()]
        rng.shuffle(free)
        decodes = {rid: rng.randrange(VOCAB) for rid in slots if rng.random() < (0.3 if step % 3 else 0.9)}
        prompts = {}
        for number, slot in enumerate(free[: rng.choice((0, 0, 0, 1, 1, 3))]):
            rid = f"{step}/{number}"
            prompts[rid] = slot, tokens_of(rng.choice((1, 2, 7, 30, 60)), seed=step)
            seen["a slot is used again"] += slot in used
        if not prompts and not decodes:
            continue
        everything = {rid for rid in prompts if rng.random() < 0.3}
        pair.step(prompts, decodes, all_logits=everything)
        slots |= {rid: slot for rid, (slot, _) in prompts.items()}
        used |= set(slots.values())
        running = {slots[rid] for rid in decodes}
        seen["prompts and decodes share a step"] += bool(prompts and decodes)
        seen["logits of a whole prompt"] += bool(everything)
        for forward in pair.forwards():
            if forward.mode == "prefill":
                seen["a prompt is padded"] += forward.padded_tokens > 0
            elif forward.num_rows > forward.num_requests:
                idle = set(range(forward.num_rows)) - running
                seen["a free slot goes along"] += bool(idle - set(slots.values()))
                seen["a slot of a request that does not run goes along"] += bool(idle & set(slots.values()))
            else:
                seen["rows are gathered"] += forward.num_rows <= max(running)
    assert min(seen.values()) >= 2 and len(seen) == 7, seen


def test_the_last_token_of_the_longest_request_has_its_place(loaded_m1: LoadedModel) -> None:
    pair = SideBySide(dataclasses.replace(loaded_m1, max_model_len=12), 3)
    pair.step({"a": (0, tokens_of(11)), "b": (1, tokens_of(2)), "c": (2, tokens_of(10))})
    pair.step({}, {"b": 5, "c": 6})  # a has no token left to run, its row goes along
    pair.step({}, {"a": 7, "b": 8, "c": 9})


# --- slots ------------------------------------------------------------------------------------------------------------


def test_joining_and_leaving_moves_no_other_request(pair: SideBySide) -> None:
    pair.step({"a": (0, tokens_of(5)), "b": (1, tokens_of(9)), "c": (2, tokens_of(3))})
    before, where = pair.kv(1)[..., :9, :], pair.padded.cache.key_cache.data_ptr()
    pair.free("a")
    pair.step({"d": (0, tokens_of(30)), "e": (5, tokens_of(2))}, {"c": 7})
    pair.free("c")
    pair.step({}, {"d": 1, "e": 2})
    assert torch.equal(pair.kv(1)[..., :9, :], before)
    assert pair.padded.cache.key_cache.data_ptr() == where


def test_a_slot_is_wiped_when_its_owner_leaves(pair: SideBySide) -> None:
    pair.step({"a": (0, tokens_of(3)), "b": (1, tokens_of(20))})  # a's padding reaches as far as b
    pair.step({}, {"a": 1})
    pair.step({}, {"b": 1})
    assert pair.kv(0).abs().sum(dim=-1).ne(0).any(dim=0).sum(dim=-1).max() == 20
    pair.free("a")
    assert not pair.kv(0).any()
    assert pair.kv(1).any()
    assert list(pair.runner.execution.lengths()) == ["b"]


def test_what_a_request_left_behind_cannot_spoil_the_next_owner(pair: SideBySide) -> None:
    pair.step({"a": (0, tokens_of(3)), "b": (1, tokens_of(20))})
    pair.step({}, {"a": 1})
    for cache in (pair.padded.cache.key_cache, pair.padded.cache.value_cache):
        cache[:, 0, :, :20] = torch.nan  # all that a's forwards have written, padding included
    pair.free("a")
    pair.step({"c": (0, tokens_of(2))}, {"b": 1})
    for token in range(10):
        pair.step({}, {"b": token, "c": token})


def test_a_forward_that_breaks_between_two_layers_leaves_nothing_in_the_slots(make_engine: MakeEngine) -> None:
    """Some of the step's keys are in the slots already."""
    engine = make_engine(**limits(3))
    for prompt in ([5, 6, 7], [8, 9]):
        engine.add_request(prompt, greedy(9))
    engine.step()
    runner = engine.engine_core.executor.worker.model_runner
    with failing_layer(runner.model.model.layers, RuntimeError("the forward broke")):
        outputs = engine.step()
    assert [output.finish_reason for output in outputs.values()] == ["error"] * 2
    cache = runner.execution.cache
    assert not cache.key_cache.any() and not cache.value_cache.any()


# --- the price --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "num_rows"),
    [
        ((0,), 1),
        ((1,), 2),  # one of two: slot 0 goes along
        ((2,), 1),  # one of three: the row is copied
        ((0, 3), 4),  # two of four
        ((0, 4), 2),  # two of five
        ((0, 1, 5), 6),
        ((0, 1, 6), 3),
        ((2, 3, 4, 5), 6),
        ((4, 5, 6), 3),
        ((0, 1, 2, 3, 4, 5, 6, 7), 8),
    ],
    ids=str,
)
def test_idle_slots_go_along_unless_fewer_than_half_run(
    pair: SideBySide, slots: tuple[int, ...], num_rows: int
) -> None:
    pair.step({f"r{slot}": (slot, tokens_of(slot + 1)) for slot in range(8)})
    pair.forwards()
    pair.step({}, {f"r{slot}": slot for slot in slots})
    (forward,) = pair.forwards()
    assert (forward.num_requests, forward.num_rows, forward.width) == (len(slots), num_rows, 1)
    assert (forward.useful_tokens, forward.padded_tokens) == (len(slots), num_rows - len(slots))
    assert forward.kv_read == num_rows * (slots[-1] + 2)
    assert forward.kv_needed == sum(slot + 2 for slot in slots)


def test_the_memory_is_reserved_whole_and_from_the_start(loaded_m1: LoadedModel, pair: SideBySide) -> None:
    per_token = loaded_m1.kv_bytes_per_token
    cache = pair.padded.cache
    assert cache.num_bytes == 8 * loaded_m1.max_model_len * per_token
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in (cache.key_cache, cache.value_cache))
    pair.step({"a": (0, tokens_of(7))})
    usage = pair.runner.usage()
    assert (usage.kv_bytes_reserved, usage.kv_bytes_used) == (cache.num_bytes, 7 * per_token)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "layer_types",
    [("sliding_attention", "full_attention", "sliding_attention"), ("sliding_attention",) * 2],
    ids=["some layers slide", "all layers slide"],
)
def test_layers_with_a_sliding_window_give_the_answers_of_transformers(
    tmp_path: Path, execution: Any, architecture: str, layer_types: tuple[str, ...]
) -> None:
    directory = save_random_model(
        tmp_path,
        architecture,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        hidden_size=32,
    )
    model = ReferenceModel(directory)
    assert model.model.config.sliding_window == 8
    prompts = [tokens_of(length) for length in (3, 8, 9, 30, 5, 1)]  # within the window, at its edge, beyond it
    expected = [model.answer(prompt, 12) for prompt in prompts]
    config = SchedulerConfig(max_num_seqs=4, execution=execution)
    model_config = ModelConfig(model=directory, device="cpu", dtype="float32")
    with LLMEngine(model_config=model_config, scheduler_config=config) as engine:
        outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=12))
    compare(expected, [output.token_ids for output in outputs.values()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_in_slots_of_half_the_size(loaded_m1: LoadedModel, dtype: str) -> None:
    half = load_model(ModelConfig(model=loaded_m1.name, device="cpu", dtype=dtype))
    parts = {"model_loader": lambda config: half}
    with LLMEngine(parts=parts, scheduler_config=SchedulerConfig(max_num_seqs=2)) as engine:
        outputs = engine.generate_batch([tokens_of(n) for n in (3, 9, 5)], greedy(4))
        assert [(o.finish_reason, len(o.token_ids)) for o in outputs.values()] == [("length", 4)] * 3
        assert engine.stats().kv_bytes_reserved == 2 * loaded_m1.max_model_len * loaded_m1.kv_bytes_per_token // 2


# --- memory that is not there -----------------------------------------------------------------------------------------


def test_slots_that_cannot_fit_are_refused_with_what_would_fit(
    make_engine: MakeEngine, loaded_m1: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = loaded_m1.max_model_len * loaded_m1.kv_bytes_per_token
    monkeypatch.setattr(slot_cache, "available_memory", lambda device: 3 * slot)
    with pytest.raises(ConfigError) as caught:
        make_engine(**limits(12))
    said = str(caught.value)
    assert f"12 slots x {loaded_m1.max_model_len:,} tokens" in said
    assert f"max_model_len of at most {loaded_m1.max_model_len // 4}" in said
    assert "max_num_seqs of at most 3" in said
    assert "execution='per_request'" in said
    for settings in ({}, {"max_model_len": loaded_m1.max_model_len // 4}):
        engine = make_engine(**limits(12 if settings else 3), **settings)  # type: ignore[arg-type]
        assert engine.generate("a", greedy(2)).finish_reason == "length"
    assert make_engine(**limits(12, execution="per_request")).stats().kv_bytes_reserved == 0


def test_only_what_would_help_is_named(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "available_memory", lambda device: 100)
    with pytest.raises(ConfigError) as caught:
        make_engine(**limits(12))
    assert "at most" not in str(caught.value) and "execution='per_request'" in str(caught.value)


def test_memory_that_the_system_refuses_is_a_configuration_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_cache, "available_memory", lambda device: None)  # unknown in advance
    with pytest.raises(ConfigError, match="which cannot be allocated"):
        make_engine(**limits(2**40))
