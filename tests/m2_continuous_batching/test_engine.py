"""m2 behind the face of m1: requests share steps, join and leave between any two of them, and nobody notices.

What the face promises whatever runs behind it is tested with m1, and what all batches have in common in
`tests/engine_contract`; here is what slots and padding change.
"""

from typing import Any

import pytest

from m2_continuous_batching import (
    InvalidParamsError,
    LLMEngine,
    SamplingParams,
    SchedulerConfig,
)
from tests.m2_continuous_batching.engines import (
    MAX_MODEL_LEN,
    MakeEngine,
    Recorder,
    check_drained,
    check_step,
    greedy,
    held,
    limits,
    run,
)


def ids(length: int, first: int = 5) -> list[int]:
    """A prompt of this length."""
    return list(range(first, first + length))


# --- the worked example -----------------------------------------------------------------------------------------------


def test_requests_join_and_leave_a_running_batch(make_engine: MakeEngine, execution: str) -> None:
    """Prompts of 9, 3 and 5 tokens; the second ends after two tokens, and one of 12 takes its place."""
    engine = make_engine(**limits(3, 32, execution))
    recorder = Recorder(engine.tracer)
    for rid, length, max_tokens in (("a", 9, 6), ("b", 3, 2), ("c", 5, 6)):
        engine.add_request(ids(length), greedy(max_tokens), request_id=rid)
    outputs = [engine.step(), engine.step()]
    assert [list(o) for o in outputs] == [["a", "b", "c"]] * 2
    assert outputs[1]["b"].finished
    engine.add_request(ids(12), greedy(2), request_id="d")
    assert list(engine.step()) == ["a", "c", "d"]
    first, second, third = recorder.events("batch")
    assert (first.total_tokens, first.rids, first.prefix_lens) == (17, ("a", "b", "c"), (0, 0, 0))
    assert (second.total_tokens, second.rids, second.prefix_lens) == (3, ("a", "b", "c"), (9, 3, 5))
    assert (third.total_tokens, third.rids, third.prefix_lens) == (14, ("d", "a", "c"), (0, 10, 6))
    assert (third.joined, third.left) == (("d",), ("b",))
    assert engine.engine_core.scheduler.kv_manager.owned() == {"a": [0], "c": [2], "d": [1]}
    assert held(engine) == (9 + 2) + (5 + 2) + 12
    run(engine)


def test_a_batch_takes_as_many_steps_as_its_longest_answer(make_engine: MakeEngine, execution: str) -> None:
    engine = make_engine(**limits(8, execution=execution))
    engine.generate_batch([ids(n) for n in range(1, 9)], [greedy(n) for n in range(1, 9)])
    assert engine.stats().num_steps == 8


# --- many requests ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_five_hundred_requests_pass_through_four_slots(make_engine: MakeEngine, make_m1: Any) -> None:
    asks = [
        (ids(1 + n % 11, first=n), SamplingParams(max_tokens=1 + n % 4, temperature=n % 2, seed=n, ignore_eos=True))
        for n in range(17)
    ]
    engine = make_engine(**limits(4, 40))
    last: dict[str, Any] = {}
    for number in range(500):
        engine.add_request(*asks[number % 17], request_id=str(number))
        if number % 2:
            last |= engine.step()
            check_step(engine)
            assert engine.stats().num_running <= 4
    last |= run(engine)
    assert engine.stats().num_finished == {"length": 500}
    alone = make_m1()
    answers = [alone.generate(prompt, params).token_ids for prompt, params in asks]
    assert [last[str(number)].token_ids for number in range(500)] == [answers[number % 17] for number in range(500)]


# --- what can never run -----------------------------------------------------------------------------------------------


def test_without_a_budget_of_its_own_no_prompt_is_refused_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=200)
    assert engine.engine_core.scheduler.max_num_batched_tokens == 2048
    assert len(engine.generate(ids(199), greedy(5)).token_ids) == 1


def test_several_outputs_are_refused_with_the_milestone_that_brings_them(engine: LLMEngine) -> None:
    with pytest.raises(InvalidParamsError, match="m3_paged_attention"):
        engine.add_request(ids(3), greedy(2, n=2))


# --- the face ---------------------------------------------------------------------------------------------------------


def test_stats_count_work_and_waste(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(4))
    per_token = engine.engine_core.kv_bytes_per_token
    reserved = 4 * MAX_MODEL_LEN * per_token
    assert (engine.stats().useful_tokens, engine.stats().padded_tokens, engine.stats().kv_bytes_reserved) == (
        0,
        0,
        reserved,
    )
    for rid, length, max_tokens in (("a", 6, 3), ("b", 2, 2), ("c", 4, 9)):
        engine.add_request(ids(length), greedy(max_tokens), request_id=rid)
    waste = []
    for steps in range(1, 5):
        engine.step()
        stats = engine.stats()
        assert stats.num_steps == steps
        assert stats.kv_bytes == stats.kv_tokens * per_token and stats.kv_bytes_reserved == reserved
        waste.append((stats.num_running, stats.kv_tokens, stats.useful_tokens, stats.padded_tokens))
    assert waste == [
        (3, 12, 12, 6),  # three prompts, as wide as the longest: 18 places
        (2, 12, 15, 6),  # three rows; then b has left: 7 + 5 tokens stay
        (1, 6, 17, 7),  # a and c, and b's empty slot between them
        (1, 7, 18, 7),  # c alone in slot 2: copied, one row
    ]
    assert (engine.stats().num_prompt_tokens, engine.stats().num_output_tokens) == (12, 3 + 2 + 4)
    run(engine)
    assert engine.stats().num_output_tokens == 3 + 2 + 9


def test_per_request_execution_wastes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(4, execution="per_request"))
    for length in (6, 2, 4):
        engine.add_request(ids(length), greedy(3))
    for useful in (12, 15):
        engine.step()
        stats = engine.stats()
        assert (stats.useful_tokens, stats.padded_tokens, stats.kv_bytes_reserved) == (useful, 0, stats.kv_bytes)
    run(engine)
    assert engine.stats().kv_bytes_reserved == 0


def test_the_engine_runs_the_checkpoint_that_ships() -> None:
    """The default model behind the default configuration."""
    with LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=2)) as engine:
        prompts = [
            engine.chat_prompt([{"role": "user", "content": text}])
            for text in ("What is a KV cache?", "What is a token?")
        ]
        outputs = engine.generate_batch(prompts)
        assert [output.finish_reason for output in outputs.values()] == ["stop", "stop"]
        assert all("token" in output.text for output in outputs.values())
        assert engine.stats().kv_bytes_reserved > 0, "padded, if nobody says otherwise"
        check_drained(engine)
