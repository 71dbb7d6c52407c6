"""Several outputs of one prompt (`n > 1`), as SGLang makes them: the children meet in the cache.

m3 forked a request's blocks and copied what two of them wrote into. Here the first child computes the prompt, the
others wait a step and find it, all but the last tokens. Without a cache each computes it for itself. Outside there is
one request, one stream, one output, one end.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from m4_radix_cache import DuplicateRequestError, ForwardError, LLMEngine, RequestOutput, SamplingParams
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.model_runner import ModelRunner
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.m4_radix_cache.engines import (
    MakeEngine,
    OnEvent,
    Recorder,
    check_drained,
    check_flushed,
    check_memory,
    check_step,
    failing_runner,
    greedy,
    ids,
    run,
    setting,
)

PROMPT = [31, 32, 33, 34, 35, 36]
SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])


def drawn(max_tokens: int = 6, n: int = 4, **params: Any) -> SamplingParams:
    """Parameters that draw, from seed 11 on, and end at their length unless told otherwise."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 11, "ignore_eos": True} | params
    )


@pytest.fixture
def alone(m1: Any) -> Any:
    """`alone(prompt, params)`: m1's answers to the children, each asked for by itself."""

    def answer(prompt: Any, params: SamplingParams, seed: int = 11) -> list[RequestOutput]:
        own = {name: getattr(params, name) for name in params.__dataclass_fields__} | {"n": 1}
        return [m1.generate(prompt, SamplingParams(**own | {"seed": seed + i})) for i in range(params.n)]

    return answer


def check_children(output: RequestOutput, expected: list[RequestOutput]) -> None:
    """The completions are those of the requests asked alone, in the order of their seeds."""
    assert output.finished and [completion.index for completion in output.outputs] == list(range(len(expected)))
    for completion, wanted in zip(output.outputs, expected, strict=True):
        (single,) = wanted.outputs
        assert (completion.text, completion.token_ids) == (single.text, single.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == (single.finish_reason, single.stop_reason)


# --- what comes out, and what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [1, 9])
def test_n_outputs_are_n_single_answers_and_the_prompt_is_computed_once(
    make_engine: MakeEngine, alone: Any, cache: str, length: int, page_size: int
) -> None:
    engine = make_engine(**setting(8, page_size=page_size, cache=cache))
    output = engine.generate(ids(length), drawn(7))
    assert len({completion.token_ids for completion in output.outputs}) == 4
    check_children(output, alone(ids(length), drawn(7)))
    found = 0 if cache == "chunk" else (length - 1) // page_size * page_size
    assert engine.stats().num_prompt_tokens == length + 3 * (length - found)
    assert engine.stats().num_cached_tokens == 3 * found
    assert output.metrics.cached_tokens == 0, "what one child has found of another was computed for this request"
    assert engine.generate(ids(length), drawn(7)).metrics.cached_tokens == found, "now all of them find it"
    check_drained(engine)


@SHARING
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "random"])
def test_the_others_wait_for_the_first_child_s_prompt(make_engine: MakeEngine, cache: str, policy: str) -> None:
    engine = make_engine(**setting(8, cache=cache, policy=policy))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(21), drawn(8), request_id="p")
    engine.add_request(ids(9, 50), drawn(8, n=1), request_id="other")
    engine.step()
    check_step(engine)
    (batch,) = recorder.events("batch")
    assert sorted(batch.rids) == ["other", "p/0"] and set(batch.prefix_lens) == {0}
    engine.step()
    batch = recorder.events("batch")[-1]
    assert (sorted(batch.rids), batch.prefix_lens, batch.extend_lens) == (["p/1", "p/2", "p/3"], (20,) * 3, (1,) * 3)
    check_step(engine)
    assert engine.stats().protected_size == 20 + 8, "the prompts' pages are there once"
    run(engine)


def test_each_completion_has_its_own_end(make_engine: MakeEngine) -> None:
    engine = make_engine(eos_token_ids=range(0, 4096, 30), **setting(8))
    output = engine.generate(PROMPT, drawn(9, n=6, stop="w", ignore_eos=False))
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    assert {type(completion.stop_reason) for completion in output.outputs} == {str, type(None)}
    assert not any("w" in completion.text for completion in output.outputs)
    check_drained(engine)


def test_greedy_children_say_the_same_and_their_kv_is_kept_once(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(page_size=1))
    output = engine.generate(PROMPT, greedy(5, n=3))
    assert len({completion.token_ids for completion in output.outputs}) == 1
    assert engine.stats().evictable_size == len(PROMPT) + 4


def test_without_a_seed_the_children_count_on_from_the_request_s_own(make_engine: MakeEngine, make_m1: Any) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, n=2)
    first, second = make_engine(seed=3, **setting()).generate_batch([PROMPT, PROMPT], params).values()
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    single = SamplingParams(max_tokens=5, temperature=1.0)
    expected = list(make_m1(seed=3).generate_batch([PROMPT, PROMPT], single).values())
    assert [first.token_ids, second.token_ids] == [output.token_ids for output in expected]


# --- families in little memory ----------------------------------------------------------------------------------------


def test_more_outputs_than_may_run_start_when_there_is_a_place(make_engine: MakeEngine, alone: Any, cache: str) -> None:
    engine = make_engine(**setting(3, tokens=60, page_size=2, cache=cache))
    params = drawn(5, n=8)
    engine.add_request(PROMPT, params, request_id="p")
    check_children(run(engine)["p"], alone(PROMPT, params))
    computed = 8 * 6 if cache == "chunk" else 6 + 7 * 2
    assert engine.stats().num_prompt_tokens == computed


@pytest.mark.parametrize("page_size", [1, 4])
def test_families_in_a_memory_that_is_too_small_are_retracted_and_finish(
    make_engine: MakeEngine, alone: Any, cache: str, page_size: int
) -> None:
    limits = setting(6, tokens=64, page_size=page_size, cache=cache)
    engine = make_engine({"scheduler": ForcedRetraction}, **limits)
    prompts = [PROMPT, PROMPT, PROMPT[:3], [9]]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, drawn(8, n=3, seed=100 * number), request_id=str(number))
    outputs = run(engine)
    assert engine.stats().num_retractions > 3
    for number, prompt in enumerate(prompts):
        check_children(outputs[str(number)], alone(prompt, drawn(8, n=3), seed=100 * number))
    check_flushed(engine)


def test_salts_and_priorities_go_to_every_child(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**setting(8, page_size=1, policy="priority"))
    recorder = Recorder(engine.tracer)
    engine.add_request(PROMPT, drawn(5, n=2), request_id="low", cache_salt="a")
    engine.add_request(PROMPT, drawn(5, n=2), request_id="high", cache_salt="b", priority=1)
    outputs = run(engine)
    extends = [event for event in recorder.events("batch") if event.mode == "extend"]
    assert [event.rids for event in extends] == [("high/0", "low/0"), ("high/1", "low/1")]
    assert [event.prefix_lens for event in extends] == [(0, 0), (5, 5)], "nobody finds what the other salt has"
    for output in outputs.values():
        check_children(output, alone(PROMPT, drawn(5, n=2)))


# --- streams and batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "step"])
def test_outputs_grow_and_end_together(make_engine: MakeEngine, alone: Any, cache: str, way: str) -> None:
    engine = make_engine(**setting(3, page_size=2, cache=cache))
    params = drawn(5, logprobs=0)
    if way == "stream":
        seen = list(engine.stream(PROMPT, params, request_id="p"))
    else:
        engine.add_request(PROMPT, params, request_id="p")
        seen = [engine.step()["p"]]
        while not seen[-1].finished:
            outputs = engine.step()
            assert list(outputs) == ["p"], "every step has something new, and reports it once"
            seen.append(outputs["p"])
        assert engine.step() == {}
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    for before, after in pairwise(seen):
        assert sum(len(c.token_ids) for c in after.outputs) > sum(len(c.token_ids) for c in before.outputs)
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
            assert old.finish_reason in (None, new.finish_reason)
            assert len(new.logprobs) == len(new.token_ids)
    assert all(len(output.outputs) == 4 for output in seen)
    check_children(seen[-1], alone(PROMPT, params))
    check_drained(engine)


def test_a_batch_may_ask_for_different_numbers_of_outputs(make_engine: MakeEngine, alone: Any, cache: str) -> None:
    engine = make_engine(**setting(4, tokens=64, page_size=2, cache=cache))
    asked = [drawn(5, n=n) for n in (1, 3, 2, 7)]
    prompts = [PROMPT, [9], "some text", PROMPT[:2]]
    outputs = engine.generate_batch(prompts, asked)
    for output, prompt, params in zip(outputs.values(), prompts, asked, strict=True):
        check_children(output, alone(prompt, params))
    assert engine.stats().num_finished == {"length": 4}, "a request is what the caller asked for"
    assert engine.stats().num_output_tokens == 5 * (1 + 3 + 2 + 7)
    check_drained(engine)


# --- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_a_parent_can_be_aborted_in_every_state(make_engine: MakeEngine, alone: Any, cache: str, steps: int) -> None:
    """Waiting, held back, prefilled, growing, retracted."""
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(3, tokens=40, page_size=2, cache=cache))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    engine.add_request([9], drawn(9, n=1), request_id="other")
    last: dict[str, Any] = {}
    for _ in range(steps):
        last |= engine.step()
        check_step(engine)
    said = [completion.token_ids for completion in last["p"].outputs] if last.get("p") else [()] * 4
    assert engine.abort_request("p") and not engine.abort_request("p")
    outputs = engine.step()
    check_step(engine)
    assert outputs["p"].finished and not engine.abort_request("p")
    assert [completion.token_ids for completion in outputs["p"].outputs] == said
    assert {completion.finish_reason for completion in outputs["p"].outputs} == {"abort"}
    last = run(engine)
    assert "p" not in last
    check_children(last["other"], alone([9], drawn(9, n=1)))
    check_flushed(engine)


@pytest.mark.parametrize(("kind", "nth"), [("admit", 1), ("batch", 1), ("batch", 2), ("sampled", 3), ("result", 2)])
def test_an_abort_of_a_parent_within_a_step_ends_all_children_at_its_update(
    make_engine: MakeEngine, kind: str, nth: int
) -> None:
    engine = make_engine(**setting(4, page_size=2))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("p"), nth=nth)
    last = run(engine)
    assert reader.acted and reader.result is True and reader.error is None
    assert {completion.finish_reason for completion in last["p"].outputs} == {"abort"}
    assert engine.stats().num_steps <= 3
    assert engine.stats().num_finished == {"abort": 1}


@SHARING
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_child_given_up_leaves_the_prompt_to_the_others(
    make_engine: MakeEngine, alone: Any, cache: str, steps: int
) -> None:
    engine = make_engine(**setting(2, page_size=2, cache=cache))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    for _ in range(steps):
        engine.step()
    assert engine.abort_request("p/0")
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length", "length"]
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids
    assert engine.stats().num_prompt_tokens == 6 + 2 * (2 if steps == 0 else 3), "computed once all the same"


@SHARING
def test_the_first_child_given_up_while_the_prompt_is_computed(make_engine: MakeEngine, alone: Any, cache: str) -> None:
    """Nothing of it is kept, so one of those that were held back computes it."""
    engine = make_engine(**setting(4, page_size=2, cache=cache))
    OnEvent(engine.tracer, "batch", lambda: engine.abort_request("p/0"))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length", "length"]
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids
    assert engine.stats().num_prompt_tokens == 6 + 6 + 2 * 2


def test_a_closed_stream_ends_its_whole_family(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, page_size=2))
    for reads in range(4):
        stream = engine.stream(PROMPT, drawn(6))
        for _ in range(reads):
            next(stream)
        stream.close()
        assert run(engine) == {}
    assert engine.stats().num_finished == {"abort": 4}


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_closing_an_engine_with_a_family_in_flight_leaves_nothing(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(**setting(3, tokens=40, page_size=2))
    engine.add_request(PROMPT, drawn(9))
    for _ in range(steps):
        engine.step()
    engine.close()
    check_memory(engine)
    assert engine.stats().kv_tokens == 0


# --- what goes wrong --------------------------------------------------------------------------------------------------


@SHARING
def test_a_prompt_whose_forward_failed_takes_only_the_first_child_along(
    make_engine: MakeEngine, alone: Any, cache: str
) -> None:
    """The others were not in that step. The error reaches the caller with the end of the family."""
    parts = {"model_runner": failing_runner(RuntimeError("broken"), rid="p/0", position=0)}
    engine = make_engine(parts, **setting(4, page_size=2, cache=cache))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    output = run(engine)["p"]
    assert output.finish_reason == "error" and "broken" in str(output.error)
    assert [completion.finish_reason for completion in output.outputs] == ["error", "length", "length", "length"]
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids
    assert engine.stats().num_finished == {"error": 1}


def no_numbers_for(row: int, in_step: int) -> type[ModelRunner]:
    """A runner that once gives no numbers for the token of one row of a decode."""

    class NoNumbers(ModelRunner):
        num_steps = 0

        def forward(self, batch: ForwardBatch) -> Tensor:
            hidden = super().forward(batch)
            self.num_steps += 1
            if self.num_steps == in_step:
                hidden[row] = torch.nan
            return hidden

    return NoNumbers


def test_a_child_whose_logits_are_no_numbers_fails_alone(make_engine: MakeEngine, alone: Any, cache: str) -> None:
    steps = {"chunk": 3}.get(cache, 4)
    engine = make_engine({"model_runner": no_numbers_for(2, steps)}, **setting(4, page_size=2, cache=cache))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    output = run(engine)["p"]
    assert isinstance(output.error, ForwardError)
    assert [c.finish_reason for c in output.outputs] == ["length", "length", "error", "length"]
    for completion, wanted in zip(output.outputs, alone(PROMPT, drawn(6)), strict=True):
        assert completion.token_ids == wanted.token_ids[: len(completion.token_ids)]
    assert len(output.outputs[2].token_ids) == 2
    check_flushed(engine)


def test_ids_of_children_may_not_clash(make_engine: MakeEngine) -> None:
    engine: LLMEngine = make_engine(**setting(4))
    engine.add_request([5], greedy(5), request_id="p/1")
    with pytest.raises(DuplicateRequestError, match=r"'p/1' is in use.*'p' with n=3 needs it"):
        engine.add_request(PROMPT, drawn(4, n=3), request_id="p")
    assert list(engine.step()) == ["p/1"], "and nothing of it was queued"
    run(engine)
