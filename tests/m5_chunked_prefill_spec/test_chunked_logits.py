"""What the model says does not depend on how a prompt is cut, nor on who shares the step.

Tokens are compared everywhere else; here the logits themselves are: those of the first token however the prompt was
cut, and those of decodes in a mixed step against those of a step of decodes alone (S2).
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from m5_chunked_prefill_spec.model_runner import ModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from tests.equivalence.traffic import prompt_of
from tests.m5_chunked_prefill_spec.engines import MakeEngine, greedy, run, setting

SCHEDULES = pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])
ALMOST = 1e-4


class Listening:
    """Parts of an engine that keep the logits of every token that was sampled."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}
        """By request, and by how many tokens stood before. What stood behind a wrong guess is computed again."""
        self.modes: list[str] = []
        listening = self

        class Runner(ModelRunner):
            def execute_model(self, batch: ModelWorkerBatch) -> Any:
                listening.batch = batch
                listening.modes.append(batch.forward_mode.name.lower())
                output = super().execute_model(batch)
                del listening.batch
                return output

        self.parts: Mapping[str, Any] = {"model_runner": Runner}

    def hear(self, engine: Any) -> None:
        """Listen to the rejection sampler of this engine."""
        runner = engine.engine_core.executor.worker.model_runner
        sample = runner.rejection_sampler

        def heard(req_ids: Any, info: Any, logits: Tensor, metadata: Any, sample_lens: Any, drafts: Any) -> Any:
            first = 0
            for rid, count, seq_len in zip(req_ids, sample_lens, self.batch.seq_lens.tolist(), strict=True):
                for offset in range(count):
                    self.logits[rid, seq_len - count + 1 + offset] = logits[first + offset].clone()
                first += count
            return sample(req_ids, info, logits, metadata, sample_lens, drafts)

        runner.rejection_sampler = heard

    batch: ModelWorkerBatch


def listened(make_engine: MakeEngine, asked: Mapping[str, tuple[list[int], int]], **limits: Any) -> Listening:
    """Let these prompts run, one more arriving before each step."""
    listening = Listening()
    engine = make_engine(listening.parts, **setting(8, **limits))
    listening.hear(engine)
    for rid, (prompt, max_tokens) in asked.items():
        engine.add_request(prompt, greedy(max_tokens), request_id=rid)
        engine.step()
    run(engine)
    return listening


@pytest.mark.sample(8)
@SCHEDULES
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cut", [16, 17, 29, 64])
def test_the_logits_of_the_first_token_do_not_depend_on_how_the_prompt_is_cut(
    make_engine: MakeEngine, schedule: str, page_size: int, cut: int
) -> None:
    prompt = prompt_of(100)
    whole = listened(make_engine, {"a": (prompt, 3)}, page_size=page_size, max_num_batched_tokens=256)
    limits: dict[str, Any] = {"page_size": page_size, "schedule": schedule, "chunked_prefill_size": cut}
    pieces = listened(make_engine, {"a": (prompt, 3)}, max_num_batched_tokens=256, **limits)
    assert whole.logits.keys() == pieces.logits.keys() == {("a", 100), ("a", 101), ("a", 102)}
    for key, logits in whole.logits.items():
        torch.testing.assert_close(pieces.logits[key], logits, atol=ALMOST, rtol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("method", [None, "ngram"])
def test_the_logits_of_a_decode_in_a_mixed_step_are_those_of_a_step_of_decodes(
    make_engine: MakeEngine, page_size: int, method: Any
) -> None:
    streams = {f"s{number}": (prompt_of(5 + 3 * number, number), 12) for number in range(3)}
    long = {"long": (prompt_of(90, 7), 2)}
    alone = listened(make_engine, streams, page_size=page_size, max_num_batched_tokens=256)
    mixed = listened(
        make_engine, streams | long, page_size=page_size, max_num_batched_tokens=16, method=method, drafts=3
    )
    assert alone.modes.count("decode") > 8 and mixed.modes.count("mixed") > 4
    compared = 0
    for key in alone.logits.keys() & mixed.logits.keys():
        torch.testing.assert_close(mixed.logits[key], alone.logits[key], atol=ALMOST, rtol=0)
        compared += 1
    assert compared == 3 * 12
