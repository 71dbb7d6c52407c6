"""Requests in any company, arriving and leaving at any step, get the tokens of m1.

Hypothesis makes the traffic, with the strategies and the comparison of `tests/equivalence/traffic.py`: several outputs
per prompt, in pools so small that requests are thrown out by recompute and by swap. All of it runs on the native
kernels and on torch's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m3_paged_attention import KVCapacityError, ModelConfig, SamplingParams, row_sampler
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.model_loader import load_model
from tests.equivalence import answers
from tests.equivalence.answers import assert_same_logprobs
from tests.equivalence.draws import noting
from tests.equivalence.forced_preemption import ForcedPreemption
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, Alone, Ask, asks_of, check_ask, prompt_of, serve
from tests.m3_paged_attention.engines import InTurn, MakeEngine, check_drained, check_step, setting

ASKS = asks_of(
    (1, 2, 3, 5, 8, 13, 16, 17, 21),
    CLEAR_SETTINGS,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    arrival=st.integers(0, 12),
    patience=st.none() | st.none() | st.integers(0, 9),
)


@pytest.fixture(scope="module", params=["native", "torch"])
def loaded(request: pytest.FixtureRequest, tiny_directory: Path) -> LoadedModel:
    """The tiny model on each backend of a CPU."""
    if request.param == "native" and (obstacle := native_library.obstacle()):
        pytest.skip(obstacle)
    config = ModelConfig(model=tiny_directory, device="cpu", dtype="float32", attention_backend=request.param)
    return load_model(config)


@pytest.mark.sample(2)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_any_traffic_gets_the_tokens_of_m1(make_engine: MakeEngine, alone: Alone, mode: str, block_size: int) -> None:
    references: list[Reference] = []
    num_preemptions = [0]

    @settings(max_examples=10)
    @given(
        asks=st.lists(ASKS, min_size=3, max_size=8),
        max_num_seqs=st.sampled_from([1, 2, 4, 8]),
        spare_blocks=st.integers(0, 6),
        spare_budget=st.none() | st.integers(0, 3),
        parts=st.sampled_from([{}, {"preemption": InTurn}, {"scheduler": ForcedPreemption}]),
    )
    def holds(
        asks: list[Ask], max_num_seqs: int, spare_blocks: int, spare_budget: int | None, parts: dict[str, Any]
    ) -> None:
        longest = max(ask.prompt_len for ask in asks)
        budget = None if spare_budget is None else max(max_num_seqs, longest) + spare_budget
        blocks = -(-longest // block_size) + spare_blocks
        limits = setting(max_num_seqs, budget, blocks=blocks, block_size=block_size, mode=mode)
        with make_engine(parts, eos_token_ids=EOS, **limits) as engine:
            outputs = serve(engine, asks, check_step)
            check_drained(engine)
            num_preemptions[0] += engine.stats().num_preemptions

        def may_fail(ask: Ask, error: Any, num_tokens: int) -> bool:
            return isinstance(error, KVCapacityError) and ask.prompt_len + num_tokens > blocks * block_size

        for ask, output in zip(asks, outputs, strict=True):
            references.extend(check_ask(ask, output, alone, may_fail))

    holds()
    check_cuts(references)
    assert num_preemptions[0] > 10


def test_native_kernels_do_the_work_of_the_native_backend(
    make_engine: MakeEngine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves widths that fill no vector to torch: a model of such heads would not test it."""

    def refuse(self: TorchBackend, *_: Any) -> Any:
        raise AssertionError("torch attends")

    monkeypatch.setattr(TorchBackend, "attention", refuse)
    output = make_engine().generate(prompt_of(8), SamplingParams(max_tokens=3))
    assert (output.error is None) == (loaded.model.backend.name == "native")


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_logits_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, mode: str, block_size: int) -> None:
    """Every row of logits of every request, with a preemption in every third step."""
    prompts = [prompt_of(n) for n in (1, 21, 5, 16)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    theirs: list[Tensor] = []
    expected = make_m1({"sampler": noting(theirs)}).generate_batch(prompts, params)
    wanted = {
        (tuple(prompt), place): theirs[number * 9 + place]
        for number, prompt in enumerate(prompts)
        for place in range(9)
    }
    ours: list[Tensor] = []
    engine = make_engine(
        {"sampler": noting(ours), "scheduler": ForcedPreemption}, **setting(4, block_size=block_size, mode=mode)
    )
    places: list[tuple[tuple[int, ...], int]] = []
    runner = engine.engine_core.executor.worker.model_runner
    sampler = runner.sampler

    def noted(req_ids: Any, batch: Any, logits: Tensor, metadata: Any) -> Any:
        places.extend((tuple(row.prompt_token_ids), len(row.output_token_ids)) for row in batch.rows)
        return sampler(req_ids, batch, logits, metadata)

    noted.best = sampler.best  # type: ignore[attr-defined]
    runner.sampler = noted
    outputs = engine.generate_batch(prompts, params)
    assert engine.stats().num_preemptions >= 3
    assert [o.token_ids for o in outputs.values()] == [o.token_ids for o in expected.values()]
    assert sorted(places) == sorted(wanted), "each row once: no token is sampled again after a preemption"
    for place, row in zip(places, ours, strict=True):
        torch.testing.assert_close(row, wanted[place], rtol=0, atol=1e-4)


def test_logprobs_of_prompt_and_output_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    engine = make_engine({"scheduler": ForcedPreemption}, **setting(4, block_size=4, mode=mode))
    # Far down the list many tokens are equally likely up to rounding, and other kernels round otherwise.
    answers.check_logprobs(engine, make_m1(), lengths=(13, 1, 21, 5, 8, 17), top_k=5, exact_ranks=False)
    assert engine.stats().num_preemptions > 0


def test_prompt_logprobs_of_a_long_prompt_come_in_pieces(make_engine: MakeEngine, make_m1: Any) -> None:
    """More rows than are computed at a time."""
    prompt, params = prompt_of(21) * 12, SamplingParams(max_tokens=2, prompt_logprobs=1)
    seen: list[int] = []
    engine = make_engine(**setting(2, block_size=16))
    model = engine.engine_core.executor.worker.model_runner.model
    compute = model.compute_logits
    at_a_time, row_sampler.ROWS_AT_A_TIME = row_sampler.ROWS_AT_A_TIME, 100
    model.compute_logits = lambda hidden: (seen.append(len(hidden)), compute(hidden))[1]
    try:
        output = engine.generate(prompt, params)
    finally:
        del model.compute_logits
        row_sampler.ROWS_AT_A_TIME = at_a_time
    assert seen == [100, 100, 51, 1, 1]
    assert_same_logprobs(output.prompt_logprobs, make_m1().generate(prompt, params).prompt_logprobs, exact_ranks=False)
