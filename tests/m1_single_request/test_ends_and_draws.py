"""Where answers end, and what makes a draw reproducible, seen through the face."""

import pytest

from m1_single_request import RequestOutput, SamplingParams
from tests.m1_single_request.engines import MakeEngine, drain, greedy

PROMPT = [11, 12, 13]


@pytest.fixture
def free(make_engine: MakeEngine) -> RequestOutput:
    """The answer to PROMPT if nothing stops it; its first tokens differ from each other."""
    output = make_engine().generate(PROMPT, greedy(12))
    assert len(set(output.token_ids[:6])) == 6
    return output


# --- ends -------------------------------------------------------------------------------------------------------------


def test_any_end_of_sequence_id_ends_the_output_unless_it_is_ignored(
    make_engine: MakeEngine, free: RequestOutput
) -> None:
    for position in (0, 2, 5):
        engine = make_engine(eos_token_ids=[4090, free.token_ids[position]])
        output = engine.generate(PROMPT, SamplingParams(max_tokens=12))
        assert output.token_ids == free.token_ids[: position + 1]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        tokenizer = engine.engine_core.input_processor.tokenizer
        assert output.text == tokenizer.decode(free.token_ids[:position]), "the text of the stop token is not shown"
        assert engine.generate(PROMPT, greedy(12)).token_ids == free.token_ids


def test_min_tokens_keeps_stops_away(make_engine: MakeEngine, free: RequestOutput) -> None:
    engine = make_engine(eos_token_ids=[free.token_ids[1]])
    output = engine.generate(PROMPT, SamplingParams(max_tokens=12, min_tokens=6))
    assert len(output.token_ids) >= 6
    assert output.token_ids[0] == free.token_ids[0]
    assert free.token_ids[1] not in output.token_ids[:5], "it cannot be sampled before"
    tokenizer = engine.engine_core.input_processor.tokenizer
    stop = tokenizer.decode([free.token_ids[0]])
    assert len(engine.generate(PROMPT, greedy(12, stop=stop)).token_ids) == 1
    assert len(engine.generate(PROMPT, greedy(12, stop=stop, min_tokens=4)).token_ids) >= 4


# --- draws ------------------------------------------------------------------------------------------------------------

DRAWN = {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize("seed", [7, 0])
def test_a_seed_fixes_the_answer_in_every_company(make_engine: MakeEngine, seed: int) -> None:
    params = SamplingParams(**DRAWN, seed=seed)
    expected = make_engine().generate(PROMPT, params).token_ids
    engine = make_engine(seed=5)
    engine.generate("before", SamplingParams(**DRAWN))
    outputs = list(engine.generate_batch(["a", PROMPT, "b", PROMPT], params).values())
    assert outputs[1].token_ids == outputs[3].token_ids == expected
    assert list(engine.stream(PROMPT, params))[-1].token_ids == expected
    rid = engine.add_request(PROMPT, params)
    assert drain(engine)[rid].token_ids == expected
    others = {engine.generate(PROMPT, SamplingParams(**DRAWN, seed=other)).token_ids for other in range(1, 5)}
    assert len(others) == 4 and expected not in others


def test_without_a_seed_the_engine_s_seed_and_the_place_in_line_decide(make_engine: MakeEngine) -> None:
    """However a request is made, and whether an earlier one was refused."""
    params = SamplingParams(**DRAWN)

    def answers(seed: int) -> list[tuple[int, ...]]:
        outputs = make_engine(seed=seed).generate_batch([PROMPT] * 3, params)
        return [output.token_ids for output in outputs.values()]

    expected = answers(3)
    assert answers(3) == expected != answers(4) and len(set(expected)) == 3
    engine = make_engine(seed=3)
    streams = [engine.stream(PROMPT, params, request_id=rid) for rid in ("z", "y", "x")]
    assert [list(stream)[-1].token_ids for stream in reversed(streams)] == expected[::-1]
    engine = make_engine(seed=3)
    assert [engine.generate(PROMPT, params).token_ids for _ in range(3)] == expected
    first, _, third = make_engine(seed=3).generate_batch([PROMPT, "", PROMPT], params).values()
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
