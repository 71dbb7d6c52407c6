"""Several outputs of one prompt (`n > 1`): prefilled once, told apart by their draws, reported together.

Inside they are requests `rid/0`, `rid/1`, ...; outside there is one request, one stream, one output, one end.
"""

from itertools import pairwise
from typing import Any

import pytest

from m3_paged_attention import (
    DuplicateRequestError,
    InvalidParamsError,
    KVCapacityError,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from m3_paged_attention.output_processor import OutputProcessor
from tests.m3_paged_attention.engines import (
    MakeEngine,
    OnEvent,
    Recorder,
    check_drained,
    check_memory,
    check_step,
    greedy,
    held,
    ids,
    run,
    setting,
)

PROMPT = [31, 32, 33, 34, 35, 36]


def drawn(max_tokens: int = 6, n: int = 4, **params: Any) -> SamplingParams:
    """Parameters that draw, from seed 11 on, and end at their length unless told otherwise."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "n": n, "temperature": 1.0, "seed": 11, "ignore_eos": True} | params
    )


@pytest.fixture
def alone(make_m1: Any) -> Any:
    """`alone(prompt, params)`: m1's answers to the children, each asked for by itself."""
    engine = make_m1()

    def answer(prompt: Any, params: SamplingParams, seed: int = 11) -> list[RequestOutput]:
        own = {name: getattr(params, name) for name in params.__dataclass_fields__} | {"n": 1}
        return [engine.generate(prompt, SamplingParams(**own | {"seed": seed + i})) for i in range(params.n)]

    return answer


def check_children(output: RequestOutput, expected: list[RequestOutput]) -> None:
    """The completions are those of the requests asked alone, in the order of their seeds."""
    assert [completion.index for completion in output.outputs] == list(range(len(expected)))
    for completion, wanted in zip(output.outputs, expected, strict=True):
        (single,) = wanted.outputs
        assert (completion.text, completion.token_ids) == (single.text, single.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == (single.finish_reason, single.stop_reason)
        if single.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            assert completion.cumulative_logprob == pytest.approx(single.cumulative_logprob, abs=1e-3)
            assert [row.keys() for row in completion.logprobs] == [row.keys() for row in single.logprobs]


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_n_outputs_are_n_single_answers_with_the_next_seeds(
    make_engine: MakeEngine, alone: Any, length: int, block_size: int
) -> None:
    engine = make_engine(**setting(8, block_size=block_size))
    output = engine.generate(ids(length), drawn(7))
    assert len({completion.token_ids for completion in output.outputs}) == 4
    check_children(output, alone(ids(length), drawn(7)))
    check_drained(engine)


def test_each_completion_has_its_own_end(make_engine: MakeEngine) -> None:
    engine = make_engine(eos_token_ids=range(0, 4096, 30), **setting(8))
    output = engine.generate(PROMPT, drawn(9, n=6, stop="w", ignore_eos=False))
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    assert {type(completion.stop_reason) for completion in output.outputs} == {str, type(None)}
    assert len({len(completion.token_ids) for completion in output.outputs}) > 2
    assert not any("w" in completion.text for completion in output.outputs)


def test_stop_strings_and_logprobs_are_those_of_single_answers(make_engine: MakeEngine, alone: Any) -> None:
    params = drawn(9, n=6, logprobs=2, stop=["e", "a"])
    check_children(make_engine(**setting(8)).generate(PROMPT, params), alone(PROMPT, params))


def test_greedy_children_say_the_same(engine: LLMEngine) -> None:
    output = engine.generate(PROMPT, greedy(5, n=3))
    assert len({completion.token_ids for completion in output.outputs}) == 1
    assert output.outputs[0].token_ids == engine.generate(PROMPT, greedy(5)).token_ids


def test_without_a_seed_the_children_count_on_from_the_request_s_own(make_engine: MakeEngine, make_m1: Any) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, n=2)
    first, second = make_engine(seed=3).generate_batch([PROMPT, PROMPT], params).values()
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    single = SamplingParams(max_tokens=5, temperature=1.0)
    expected = list(make_m1(seed=3).generate_batch([PROMPT, PROMPT], single).values())
    assert [first.token_ids, second.token_ids] == [output.token_ids for output in expected]


def test_the_largest_seed_has_children_too(engine: LLMEngine) -> None:
    output = engine.generate(PROMPT, drawn(3, n=3, seed=2**63 - 1))
    assert len({completion.token_ids for completion in output.outputs}) == 3


def test_more_continuations_than_an_engine_can_keep_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidParamsError, match="n=1000000000 is too large"):
        engine.add_request(PROMPT, SamplingParams(n=10**9))
    assert not engine.has_unfinished_requests()


def test_an_ended_child_leaves_its_id_to_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, drawn(20, n=2, stop_token_ids=()), request_id="a")
    engine.step()
    engine.step()
    engine.abort_request("a/0")
    engine.step()
    engine.add_request(PROMPT, greedy(4), request_id="a/0")
    assert engine.abort_request("a")
    outputs = run(engine)
    assert outputs["a"].finished and outputs["a/0"].finish_reason == "length", "the new one is nobody's child"


def test_prompt_logprobs_are_reported_once(make_engine: MakeEngine, alone: Any) -> None:
    params = drawn(4, n=3, prompt_logprobs=2, logprobs=1)
    engine = make_engine(**setting(4, block_size=2))
    output = engine.generate(PROMPT, params)
    assert engine.stats().num_prompt_tokens == len(PROMPT), "computed once"
    expected = alone(PROMPT, params)
    check_children(output, expected)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    for row, wanted in zip(output.prompt_logprobs[1:], expected[0].prompt_logprobs[1:], strict=True):
        assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
            {token: entry.logprob for token, entry in wanted.items()}, abs=1e-4
        )


def test_a_parent_s_output_is_the_first_completion_s_at_a_glance(engine: LLMEngine) -> None:
    output = engine.generate(PROMPT, drawn())
    first = output.outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == (first.text, first.token_ids, first.finish_reason)
    assert output.prompt_token_ids == tuple(PROMPT) and output.request_id == "req-0"
    assert output.finished and output.error is None
    assert output.metrics.num_output_tokens == 4 * 6
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


# --- what it saves ----------------------------------------------------------------------------------------------------


def test_the_prompt_is_computed_and_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(8, blocks=30))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(21), drawn(8), request_id="p")
    engine.step()
    assert (engine.stats().num_running, held(engine)) == (4, 21)
    (batch,) = recorder.events("batch")
    assert (batch.rids, batch.total_tokens) == (("p/0",), 21), "the others wait for its prompt"
    assert engine.stats().num_shared_blocks == 5
    engine.step()
    batch = recorder.events("batch")[-1]
    assert (batch.rids, batch.total_tokens) == (("p/1", "p/2", "p/3", "p/0"), 4)
    assert engine.stats().num_free_blocks == 30 - (5 + 4), "five full blocks for all, and one each"
    assert held(engine) == 20 + 2 + 3 * 1
    run(engine)
    assert engine.stats().num_prompt_tokens == 21
    assert [event.block_ids for event in recorder.events("blocks_forked")] == [(1, 2, 3, 4, 5)] * 3


def test_who_writes_into_a_shared_block_gets_a_copy_and_the_last_one_keeps_it(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(8, blocks=30))
    recorder = Recorder(engine.tracer)
    engine.generate(ids(7), drawn(3))
    copied = recorder.events("block_copied")
    assert [(event.owner, event.source, event.num_holders) for event in copied] == [
        ("req-0/0", 2, 3),
        ("req-0/1", 2, 2),
        ("req-0/2", 2, 1),
    ]
    check_drained(engine)


def test_more_outputs_than_may_run_start_on_whoever_still_runs(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**setting(3, blocks=30, block_size=2))
    recorder = Recorder(engine.tracer)
    params = drawn(5, n=8)
    check_children(engine.generate(PROMPT, params), alone(PROMPT, params))
    ways = [(event.rid.rsplit("/")[-1], event.how) for event in recorder.events("admit")]
    assert [number for number, _ in ways] == list("01234567")
    assert ways[0][1] == "prefill" and {"fork"} <= {how for _, how in ways}
    check_drained(engine)


def test_families_share_their_blocks_with_nobody_else(make_engine: MakeEngine, alone: Any, mode: str) -> None:
    engine = make_engine(**setting(6, blocks=14, block_size=2, mode=mode))
    prompts = [PROMPT, PROMPT, PROMPT[:3], [9]]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, drawn(8, n=3, seed=100 * number), request_id=str(number))
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    for number, prompt in enumerate(prompts):
        check_children(outputs[str(number)], alone(prompt, drawn(8, n=3), seed=100 * number))


# --- streams, steps, batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "step"])
def test_outputs_grow_and_end_together(make_engine: MakeEngine, alone: Any, way: str) -> None:
    engine = make_engine(**setting(3, block_size=2))
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


def test_two_families_and_a_single_stream_side_by_side(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**setting(4, blocks=20, block_size=2))
    asked = [(PROMPT, drawn(5, n=3)), ([9, 8], drawn(9, n=1)), ([7], drawn(7, n=2))]
    streams = [engine.stream(prompt, params) for prompt, params in asked]
    last: dict[int, Any] = {}
    open_streams = dict(enumerate(streams))
    while open_streams:
        for number, stream in list(open_streams.items()):
            last[number] = next(stream)
            if last[number].finished:
                del open_streams[number]
    for number, (prompt, params) in enumerate(asked):
        check_children(last[number], alone(prompt, params))
    check_drained(engine)


def test_a_batch_may_ask_for_different_numbers_of_outputs(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**setting(4, blocks=20, block_size=2))
    asked = [drawn(5, n=n) for n in (1, 3, 2, 7)]
    prompts = [PROMPT, [9], "some text", PROMPT[:2]]
    outputs = engine.generate_batch(prompts, asked)
    assert list(outputs) == [f"req-{n}" for n in range(4)]
    for output, prompt, params in zip(outputs.values(), prompts, asked, strict=True):
        check_children(output, alone(prompt, params))
    assert engine.stats().num_finished == {"length": 4}, "a request is what the caller asked for"
    assert engine.stats().num_output_tokens == 5 * (1 + 3 + 2 + 7)
    check_drained(engine)


def test_only_the_last_output_is_made_for_who_reads_only_that(make_engine: MakeEngine) -> None:
    made: list[str] = []

    class Counting(OutputProcessor):
        def make_output(self, request: Any) -> RequestOutput:
            made.append(request.request_id)
            return super().make_output(request)

    engine = make_engine({"output_processor": Counting}, **setting(4))
    engine.generate(PROMPT, drawn(5))
    assert made == ["req-0"]


# --- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(7))
def test_a_parent_can_be_aborted_in_every_state(make_engine: MakeEngine, alone: Any, mode: str, steps: int) -> None:
    """Waiting, prefilling, forked, growing, preempted."""
    engine = make_engine(**setting(3, blocks=8, block_size=2, mode=mode))
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
    assert outputs["p"].finished
    assert [completion.token_ids for completion in outputs["p"].outputs] == said
    unfinished = [completion for completion in outputs["p"].outputs if completion.finish_reason == "abort"]
    assert len(unfinished) == sum(len(tokens) < 6 for tokens in said)
    assert not engine.abort_request("p")
    last = run(engine)
    assert "p" not in last
    check_children(last["other"], alone([9], drawn(9, n=1)))
    assert engine.stats().num_finished["abort" if unfinished and len(said[0]) < 6 else "length"] >= 1


@pytest.mark.parametrize(
    ("kind", "nth"), [("admit", 1), ("blocks_forked", 2), ("batch", 1), ("batch", 2), ("sampled", 3), ("result", 2)]
)
def test_an_abort_of_a_parent_within_a_step_ends_all_children_at_its_update(
    make_engine: MakeEngine, kind: str, nth: int
) -> None:
    engine = make_engine(**setting(4, block_size=2))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("p"), nth=nth)
    last = run(engine)
    assert reader.acted and reader.result is True and reader.error is None
    assert {completion.finish_reason for completion in last["p"].outputs} == {"abort"}
    assert engine.stats().num_steps <= 3
    assert engine.stats().num_finished == {"abort": 1}


def test_a_child_may_be_given_up_alone(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**setting(4, block_size=2))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    engine.step(), engine.step()
    assert engine.abort_request("p/0"), "the first one, on whose blocks the others started"
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length", "length"]
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_child_given_up_before_the_others_start_leaves_them_the_prompt(
    make_engine: MakeEngine, alone: Any, steps: int
) -> None:
    engine = make_engine(**setting(2, block_size=2))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    for _ in range(steps):
        engine.step()
    assert engine.abort_request("p/0")
    output = run(engine)["p"]
    assert output.outputs[0].finish_reason == "abort"
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids


def test_the_first_child_given_up_while_the_prompt_is_computed(make_engine: MakeEngine, alone: Any) -> None:
    """The others stand ready on its blocks; what becomes of its prompt is known at the update."""
    engine = make_engine(**setting(4, block_size=2))
    OnEvent(engine.tracer, "batch", lambda: engine.abort_request("p/0"))
    engine.add_request(PROMPT, drawn(6), request_id="p")
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length", "length"]
    for completion, wanted in list(zip(output.outputs, alone(PROMPT, drawn(6)), strict=True))[1:]:
        assert completion.token_ids == wanted.token_ids


def test_a_closed_stream_ends_its_whole_family(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, block_size=2))
    for reads in range(4):
        stream = engine.stream(PROMPT, drawn(6))
        for _ in range(reads):
            next(stream)
        stream.close()
        assert run(engine) == {}
    assert engine.stats().num_finished == {"abort": 4}


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_closing_an_engine_with_a_family_in_flight_leaves_nothing(
    make_engine: MakeEngine, mode: str, steps: int
) -> None:
    engine = make_engine(**setting(3, blocks=8, block_size=2, mode=mode))
    engine.add_request(PROMPT, drawn(9))
    for _ in range(steps):
        engine.step()
    engine.close()
    check_memory(engine)
    assert engine.stats().kv_tokens == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_ids_of_children_may_not_clash(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4))
    engine.add_request([5], greedy(5), request_id="p/1")
    with pytest.raises(DuplicateRequestError, match=r"'p/1' is in use.*'p' with n=3 needs it"):
        engine.add_request(PROMPT, drawn(4, n=3), request_id="p")
    assert list(engine.step()) == ["p/1"], "and nothing of it was queued"
    engine.add_request(PROMPT, drawn(4, n=1), request_id="p")
    with pytest.raises(DuplicateRequestError, match="'p'"):
        engine.add_request(PROMPT, drawn(4, n=1), request_id="p")
    run(engine)
    engine.add_request(PROMPT, drawn(4, n=3), request_id="p")
    for taken in ("p", "p/0", "p/2"):
        for n in (1, 2):
            with pytest.raises(DuplicateRequestError):
                engine.add_request([5], drawn(4, n=n), request_id=taken)
    engine.add_request([5], greedy(2), request_id="p/3")
    outputs = run(engine)
    assert outputs.keys() == {"p", "p/3"}
    assert [one.finish_reason for one in outputs["p"].outputs] == ["length"] * 3, "a refused request ended nothing"
    engine.add_request(PROMPT, drawn(2), request_id="p/0")
    assert run(engine)["p/0"].finished
    engine.add_request(PROMPT, drawn(2), request_id="p")
    assert run(engine)["p"].finished


def test_a_parent_s_id_is_in_use_until_its_last_child_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, block_size=2))
    engine.add_request(PROMPT, drawn(3, n=5), request_id="p")
    ended = False
    while not ended:
        with pytest.raises(DuplicateRequestError):
            engine.add_request([5], greedy(1), request_id="p")
        ended = engine.step()["p"].finished
    engine.add_request([5], greedy(1), request_id="p")
    assert len(run(engine)["p"].outputs) == 1


def test_a_prompt_over_the_pool_is_refused_once_for_all(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, blocks=3))
    with pytest.raises(KVCapacityError, match="13 prompt tokens"):
        engine.add_request(ids(13), drawn(), request_id="p")
    assert not engine.has_unfinished_requests()
    engine.add_request(ids(5), drawn(2), request_id="p")
    assert run(engine)["p"].finish_reason == "length"


def test_children_that_outgrow_the_pool_end_one_after_the_other(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=4, block_size=2, mode=mode))
    output = engine.generate([5, 6, 7], drawn(50, n=3))
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert [len(completion.token_ids) for completion in output.outputs] == [6] * 3
    assert isinstance(output.error, KVCapacityError)
    check_drained(engine)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", None])
def test_a_number_that_is_none_is_refused(n: Any) -> None:
    with pytest.raises(InvalidParamsError, match="n="):
        SamplingParams(n=n)
