"""Parts of one's own in m5's roles: what fits is used, what does not fit or lies is an error for whom it concerns.

A composer may fill a step as it likes; a runner that brings more tokens than were guessed, or a token for half a
prompt, is not believed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from m3_paged_attention.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec import ConfigError, PartError
from m5_chunked_prefill_spec.batch_composer import Work
from m5_chunked_prefill_spec.model_runner import ModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from tests.m5_chunked_prefill_spec.engines import (
    Guessing,
    MakeEngine,
    Remembered,
    check_answers,
    check_drained,
    greedy,
    ids,
    run,
    setting,
    submit,
)

ASKED = {"a": (ids(3), greedy(9)), "b": (ids(30, 60), greedy(6)), "c": (ids(2, 40), greedy(8))}


def test_a_proposer_that_nobody_would_ask_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="the part 'proposer' has no effect"):
        make_engine({"proposer": Guessing}, **setting())


def test_a_composer_that_lets_nobody_run_ends_everybody(make_engine: MakeEngine) -> None:
    class Idle:
        def __init__(self, config: Any, costs: Any) -> None: ...

        def compose(self, work: Work) -> None:
            return None

    engine = make_engine({"composer": Idle}, **setting(4))
    submit(engine, ASKED)
    outputs = run(engine)
    assert all(isinstance(output.error, PartError) and "'composer'" in str(output.error) for output in outputs.values())


def lying(lie: Callable[[ModelWorkerBatch, ModelRunnerOutput], ModelRunnerOutput], step: int) -> type[ModelRunner]:
    """A runner that lies about its `step`th step."""
    steps: list[int] = []

    class Liar(ModelRunner):
        def execute_model(self, batch: ModelWorkerBatch) -> Any:
            output = super().execute_model(batch)
            steps.append(1)
            return lie(batch, output) if len(steps) == step else output

    return Liar


def test_a_token_for_half_a_prompt_fails_its_request_alone(make_engine: MakeEngine, m1: Remembered) -> None:
    def early(batch: ModelWorkerBatch, output: ModelRunnerOutput) -> ModelRunnerOutput:
        assert batch.sample_lens[batch.rids.index("b")] == 0, "its prompt is in pieces"
        return replace(
            output,
            req_ids=[*output.req_ids, "b"],
            sampled_token_ids=[*output.sampled_token_ids, [7]],
            logprobs=[*output.logprobs, [None]],
        )

    engine = make_engine({"model_runner": lying(early, 2)}, **setting(4, 8))
    submit(engine, ASKED)
    outputs = run(engine)
    assert isinstance(outputs["b"].error, PartError) and "returned 1 rows for request 'b'" in str(outputs["b"].error)
    check_answers(outputs, m1, {rid: asked for rid, asked in ASKED.items() if rid != "b"})
    check_drained(engine)


def test_a_rejection_sampler_of_ones_own_sees_every_step_also_those_without_drafts(make_engine: MakeEngine) -> None:
    """The tokens of greedy rows are found without logits, but not behind its back."""
    calls: list[Any] = []

    class Own(RejectionSampler):
        def __call__(self, *arguments: Any) -> Any:
            calls.append(arguments[-1])
            return super().__call__(*arguments)

    engine = make_engine({"rejection_sampler": Own}, **setting(8))
    assert len(engine.generate([5, 6, 7], greedy(4)).token_ids) == 4
    assert calls == [None] * 4
