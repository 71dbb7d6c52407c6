"""Several outputs of one prompt (`n > 1`): each is the answer to a single request with the next seed.

Inside the engine they are requests `rid/0`, `rid/1`, ...; for the caller there is one request, one stream, one output
and one end. What a milestone shares between them (blocks, pages of the cache) is tested in its own directory.
"""

from itertools import pairwise
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, InvalidParamsError, RequestOutput, SamplingParams
from tests.engine_contract.crowd import MakeEngine, ids, run
from tests.engine_contract.variants import M4_CHUNK, VARIANTS, Variant, each_of
from tests.equivalence.answers import assert_same_logprobs
from tests.support.engines import OnEvent, check_begun, greedy
from tests.support.families import Singles, check_children, drawn

pytestmark = pytest.mark.sample(3)

PROMPT = [31, 32, 33, 34, 35, 36]


FAMILIES = [variant for variant in VARIANTS if variant.has_families]


variant = each_of(FAMILIES)
"""Every milestone with several outputs, in each of its ways to run."""


@pytest.fixture
def singles(make_m1: Any) -> Singles:
    """m1's answers to the children, each asked for by itself."""
    return Singles(make_m1())


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_n_outputs_are_n_single_answers_with_the_next_seeds(
    variant: Variant, make_engine: MakeEngine, singles: Singles, length: int
) -> None:
    engine, params = make_engine(seats=8), drawn(7)
    output = engine.generate(ids(length), params)
    assert len({completion.token_ids for completion in output.outputs}) == 4
    check_children(output, singles(ids(length), params))
    variant.check_drained(engine)


def test_each_completion_has_its_own_end(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=8, eos_token_ids=range(0, 4096, 30))
    output = engine.generate(PROMPT, drawn(9, n=6, stop="w", ignore_eos=False))
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    assert {type(completion.stop_reason) for completion in output.outputs} == {str, type(None)}
    assert len({len(completion.token_ids) for completion in output.outputs}) > 2
    assert not any("w" in completion.text for completion in output.outputs)


def test_prompt_logprobs_are_reported_once(make_engine: MakeEngine, singles: Singles) -> None:
    params = drawn(4, n=3, prompt_logprobs=2, logprobs=1)
    output, expected = make_engine().generate(PROMPT, params), singles(PROMPT, params)
    check_children(output, expected)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    for row, wanted in zip(output.prompt_logprobs[1:], expected[0].prompt_logprobs[1:], strict=True):
        assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
            {token: entry.logprob for token, entry in wanted.items()}, abs=1e-4
        )


def test_without_a_seed_the_children_count_on_from_the_request_s_own(make_engine: MakeEngine, make_m1: Any) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, n=2)
    first, second = make_engine(seed=3).generate_batch([PROMPT, PROMPT], params).values()
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    single = SamplingParams(max_tokens=5, temperature=1.0)
    expected = list(make_m1(seed=3).generate_batch([PROMPT, PROMPT], single).values())
    assert [first.token_ids, second.token_ids] == [output.token_ids for output in expected]


def test_the_output_of_a_request_is_its_first_completion_at_a_glance(make_engine: MakeEngine) -> None:
    output = make_engine().generate(PROMPT, drawn())
    first = output.outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == (first.text, first.token_ids, first.finish_reason)
    assert output.prompt_token_ids == tuple(PROMPT) and output.request_id == "req-0"
    assert output.finished and output.error is None
    assert output.metrics.num_output_tokens == 4 * 6
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


# --- streams, steps, batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "step"])
def test_outputs_grow_and_end_together(variant: Variant, make_engine: MakeEngine, singles: Singles, way: str) -> None:
    engine, params = make_engine(seats=3), drawn(5, logprobs=0)
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
        assert len(before.outputs) == len(after.outputs) == 4
        assert sum(len(c.token_ids) for c in after.outputs) > sum(len(c.token_ids) for c in before.outputs)
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
            assert old.finish_reason in (None, new.finish_reason)
            assert len(new.logprobs) == len(new.token_ids)
    check_children(seen[-1], singles(PROMPT, params))
    variant.check_drained(engine)


def test_families_and_a_single_stream_are_read_side_by_side(
    variant: Variant, make_engine: MakeEngine, singles: Singles
) -> None:
    engine = make_engine(room=40)
    asked = [(PROMPT, drawn(5, n=3)), ([9, 8], drawn(9, n=1)), ([7], drawn(7, n=2))]
    last: dict[int, Any] = {}
    streams = {number: engine.stream(*one) for number, one in enumerate(asked)}
    while streams:
        for number, stream in list(streams.items()):
            last[number] = next(stream)
            if last[number].finished:
                del streams[number]
    for number, one in enumerate(asked):
        check_children(last[number], singles(*one))
    variant.check_drained(engine)


def test_a_batch_may_ask_for_different_numbers_of_outputs(
    variant: Variant, make_engine: MakeEngine, singles: Singles
) -> None:
    """With seven of them there are more than may run at once."""
    engine = make_engine(room=40)
    asked = [drawn(5, n=n) for n in (1, 3, 2, 7)]
    prompts = [PROMPT, [9], "some text", PROMPT[:2]]
    outputs = engine.generate_batch(prompts, asked)
    assert list(outputs) == [f"req-{n}" for n in range(4)]
    for output, prompt, params in zip(outputs.values(), prompts, asked, strict=True):
        check_children(output, singles(prompt, params))
    assert engine.stats().num_finished == {"length": 4}, "a request is what the caller asked for"
    assert engine.stats().num_output_tokens == 5 * (1 + 3 + 2 + 7)
    variant.check_drained(engine)


def test_only_the_last_output_is_made_for_a_caller_that_reads_only_that(
    variant: Variant, make_engine: MakeEngine
) -> None:
    made: list[str] = []

    class Counting(variant.part("output_processor")):  # type: ignore[misc]
        def make_output(self, request: Any) -> RequestOutput:
            made.append(request.request_id)
            return super().make_output(request)  # type: ignore[no-any-return]

    make_engine({"output_processor": Counting}).generate(PROMPT, drawn(5))
    assert made == ["req-0"]


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_a_request_with_children_can_be_aborted_in_every_state(
    variant: Variant, make_engine: MakeEngine, singles: Singles, steps: int
) -> None:
    """Waiting, computing its prompt, growing, without memory for all."""
    engine = make_engine(seats=3, room=24)
    engine.add_request(PROMPT, drawn(9), request_id="p")
    engine.add_request([9], drawn(9, n=1), request_id="other")
    last: dict[str, Any] = {}
    for _ in range(steps):
        last |= engine.step()
        variant.check_step(engine)
    said = [completion.token_ids for completion in last["p"].outputs] if "p" in last else [()] * 4
    assert engine.abort_request("p") and not engine.abort_request("p")
    outputs = engine.step()
    variant.check_step(engine)
    assert outputs["p"].finished and not engine.abort_request("p")
    assert [completion.token_ids for completion in outputs["p"].outputs] == said
    assert {completion.finish_reason for completion in outputs["p"].outputs} == {"abort"}
    last = run(variant, engine)
    assert "p" not in last
    check_children(last["other"], singles([9], drawn(9, n=1)))


@pytest.mark.parametrize(("kind", "nth"), [("admit", 1), ("batch", 1), ("batch", 2), ("result", 2)])
def test_an_abort_within_a_step_ends_all_children_at_its_update(
    variant: Variant, make_engine: MakeEngine, kind: str, nth: int
) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, drawn(6), request_id="p")
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("p"), nth=nth)
    last = run(variant, engine)
    assert (reader.result, reader.error) == (True, None)
    assert {completion.finish_reason for completion in last["p"].outputs} == {"abort"}
    assert engine.stats().num_steps <= 3 and engine.stats().num_finished == {"abort": 1}


@pytest.mark.parametrize("when", [0, "batch", 1, 3])
def test_a_first_child_that_is_aborted_leaves_the_prompt_to_the_others(
    variant: Variant, make_engine: MakeEngine, singles: Singles, when: int | str
) -> None:
    """After so many steps, or while the prompt is computed."""
    engine = make_engine(seats=2)
    engine.add_request(PROMPT, drawn(6), request_id="p")
    if when == "batch":
        OnEvent(engine.tracer, "batch", lambda: engine.abort_request("p/0"))
    else:
        for _ in range(int(when)):
            engine.step()
        assert engine.abort_request("p/0")
    output = run(variant, engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length", "length"]
    for completion, whole in zip(output.outputs, singles(PROMPT, drawn(6)), strict=True):
        check_begun(completion, whole)


@pytest.mark.parametrize("variant", [variant for variant in FAMILIES if variant is not M4_CHUNK], ids=str)
@pytest.mark.parametrize("when", ["waiting", "admit", "batch", "sampled", "after a step"])
@pytest.mark.parametrize("given_up", [(0,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_the_prompt_is_rated_by_another_child_if_the_first_one_is_given_up_before(
    variant: Variant, make_engine: MakeEngine, singles: Singles, when: str, given_up: tuple[int, ...]
) -> None:
    """Where children share nothing, all of them run in the step of the first, which may then be too late."""
    engine, params = make_engine(), drawn(4, prompt_logprobs=2)
    engine.add_request(PROMPT, params, request_id="p")

    def give_up() -> None:
        assert all(engine.abort_request(f"p/{child}") for child in given_up)

    if when == "after a step":
        engine.step()
    if when in ("waiting", "after a step"):
        give_up()
    else:
        OnEvent(engine.tracer, when, give_up, rid="p/0")
    output, expected = run(variant, engine)["p"], singles(PROMPT, params)
    assert_same_logprobs(output.prompt_logprobs, expected[0].prompt_logprobs, exact_ranks=False)
    for child, (completion, whole) in enumerate(zip(output.outputs, expected, strict=True)):
        assert completion.finish_reason == ("abort" if child in given_up else "length")
        assert when == "after a step" or child not in given_up or not completion.token_ids
        check_begun(completion, whole)


def test_a_closed_stream_ends_its_whole_family(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for reads in range(4):
        stream = engine.stream(PROMPT, drawn(9))
        for _ in range(reads):
            next(stream)
        stream.close()
        assert run(variant, engine) == {}
    assert engine.stats().num_finished == {"abort": 4}


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_closing_an_engine_with_a_family_in_flight_leaves_nothing(
    variant: Variant, make_engine: MakeEngine, steps: int
) -> None:
    engine = make_engine(seats=3, room=24)
    engine.add_request(PROMPT, drawn(9))
    for _ in range(steps):
        engine.step()
    engine.close()
    assert engine.stats().kv_tokens == 0 and not list(variant.owners(engine))


# --- request ids ------------------------------------------------------------------------------------------------------


def test_ids_of_children_may_not_clash(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request([5], greedy(5), request_id="p/1")
    with pytest.raises(DuplicateRequestError, match=r"'p/1' is in use.*'p' with n=3 needs it"):
        engine.add_request(PROMPT, drawn(4, n=3), request_id="p")
    assert list(engine.step()) == ["p/1"], "and nothing of it was queued"
    engine.add_request(PROMPT, drawn(4, n=1), request_id="p")
    with pytest.raises(DuplicateRequestError, match="'p'"):
        engine.add_request(PROMPT, drawn(4, n=1), request_id="p")
    run(variant, engine)
    engine.add_request(PROMPT, drawn(4, n=3), request_id="p")
    for taken in ("p", "p/0", "p/2"):
        for n in (1, 2):
            with pytest.raises(DuplicateRequestError):
                engine.add_request([5], drawn(4, n=n), request_id=taken)
    engine.add_request([5], greedy(2), request_id="p/3")
    outputs = run(variant, engine)
    assert outputs.keys() == {"p", "p/3"}
    assert [one.finish_reason for one in outputs["p"].outputs] == ["length"] * 3, "a refused request ended nothing"


def test_an_ended_child_leaves_its_id_to_others(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, drawn(20, n=2), request_id="a")
    engine.step()
    engine.step()
    engine.abort_request("a/0")
    engine.step()
    engine.add_request(PROMPT, greedy(4), request_id="a/0")
    assert engine.abort_request("a")
    outputs = run(variant, engine)
    assert outputs["a"].finished and outputs["a/0"].finish_reason == "length", "the new one is no child"


def test_more_continuations_than_an_engine_can_keep_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidParamsError, match="n=1000000000 is not valid"):
        engine.add_request(PROMPT, SamplingParams(n=10**9))
    assert not engine.has_unfinished_requests()
