"""m3 behind the face of m1: requests share steps and memory, are thrown out and come back, and nobody notices.

What the face promises whatever runs behind it is tested with m1; here is what blocks change.
"""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from m3_paged_attention import (
    CacheConfig,
    DuplicateRequestError,
    EngineClosedError,
    EngineUsageError,
    LLMEngine,
    PromptTooLongError,
    SamplingParams,
    SchedulerConfig,
)
from tests.m3_paged_attention.engines import (
    MAX_MODEL_LEN,
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
    unfinished,
)

# --- the worked example -----------------------------------------------------------------------------------------------


def test_requests_join_and_leave_a_running_batch(make_engine: MakeEngine) -> None:
    """Prompts of 9, 3 and 5 tokens; the second ends after two tokens, and one of 12 takes its place."""
    engine = make_engine(**setting(3, 32, blocks=20))
    recorder = Recorder(engine.tracer)
    for rid, length, max_tokens in (("a", 9, 6), ("b", 3, 2), ("c", 5, 6)):
        engine.add_request(ids(length), greedy(max_tokens), request_id=rid)
    outputs = [engine.step(), engine.step()]
    assert [list(o) for o in outputs] == [["a", "b", "c"]] * 2
    assert outputs[1]["b"].finished
    engine.add_request(ids(12), greedy(2), request_id="d")
    assert list(engine.step()) == ["d", "a", "c"]
    first, second, third = recorder.events("batch")
    assert (first.total_tokens, first.rids, first.prefix_lens) == (17, ("a", "b", "c"), (0, 0, 0))
    assert (second.total_tokens, second.rids, second.prefix_lens) == (3, ("a", "b", "c"), (9, 3, 5))
    assert (third.total_tokens, third.rids, third.prefix_lens) == (14, ("d", "a", "c"), (0, 10, 6))
    assert (third.joined, third.left) == (("d",), ("b",))
    assert engine.engine_core.scheduler.kv_manager.owned() == {"a": [1, 2, 3], "c": [5, 6], "d": [7, 8, 9]}
    assert held(engine) == (9 + 2) + (5 + 2) + 12
    run(engine)


def test_a_step_is_one_forward_whatever_it_mixes(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4))
    runner = engine.engine_core.executor.worker.model_runner
    shapes: list[tuple[int, int]] = []
    forward = runner.forward
    runner.forward = lambda model_input: (
        shapes.append((len(model_input.input_ids), model_input.attn_metadata.num_seqs)) or forward(model_input)
    )
    engine.add_request(ids(9), greedy(4))
    engine.step()
    engine.add_request(ids(6), greedy(4)), engine.add_request(ids(3), greedy(4))
    engine.step()
    engine.step()
    assert shapes == [(9, 1), (6 + 3 + 1, 3), (3, 3)], "no padding"
    run(engine)


def test_blocks_are_moved_before_the_forward_in_their_order(make_engine: MakeEngine) -> None:
    """Swap in, swap out, copy: a block that comes back may leave again, and one that has left may be a target."""
    engine = make_engine(**setting(2, blocks=4, block_size=2, mode="swap"))
    engine.add_request(ids(1), greedy(1))
    runner = engine.engine_core.executor.worker.model_runner
    kv = runner.kv
    with torch.inference_mode():
        for block in range(5):
            kv._blocks[:, :, block] = block
        kv._host_blocks[:] = 10
    decision = engine.engine_core.scheduler.schedule()
    nothing = dataclasses.replace(decision, scheduled_new_reqs=[], num_scheduled_tokens={})
    moves = {"blocks_to_swap_in": [(0, 3)], "blocks_to_swap_out": [(3, 1), (1, 2)], "blocks_to_copy": [(2, 1), (4, 2)]}
    engine.engine_core.executor.execute_model(dataclasses.replace(nothing, **moves))
    assert [kv._blocks[0, 0, block].unique().tolist() for block in range(5)] == [[0], [2], [4], [10], [4]]
    assert [kv._host_blocks[block].unique().tolist() for block in range(3)] == [[10], [10], [1]]
    run(engine)


def test_with_room_for_one_it_is_m1(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(1))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(3), greedy(2), request_id=rid)
    order = [list(engine.step()) for _ in unfinished(engine)]
    assert order == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]]


def test_a_late_prompt_may_delay_a_running_request_by_one_step_only(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, 8))
    engine.add_request(ids(2), greedy(20), request_id="a")
    engine.step()
    recorder = Recorder(engine.tracer)
    for number in range(6):
        engine.add_request(ids(8, number), greedy(1), request_id=f"long-{number}")
    for _ in range(12):
        engine.step()
        check_step(engine)
    steps = [batch.rids for batch in recorder.events("batch")]
    assert steps[:4] == [("long-0",), ("a",), ("long-1",), ("a",)]
    assert all("a" in first + second for first, second in pairwise(steps))


# --- more runs at once ------------------------------------------------------------------------------------------------


def test_short_requests_share_what_one_long_slot_would_take(make_engine: MakeEngine) -> None:
    """The memory of a single request of the greatest length serves sixteen short ones at once."""
    engine = make_engine(**setting(16, blocks=MAX_MODEL_LEN // 4))
    for n in range(16):
        engine.add_request(ids(1 + n % 7, n), greedy(8), request_id=str(n))
    engine.step()
    assert engine.stats().num_running == 16
    assert engine.stats().num_preemptions == 0
    run(engine)


def test_two_hundred_requests_pass_through_little_memory(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    asks = [
        (ids(1 + n % 7, first=n), SamplingParams(max_tokens=4 + n % 9, temperature=n % 2, seed=n, ignore_eos=True))
        for n in range(17)
    ]
    engine = make_engine(**setting(6, 40, blocks=12, block_size=2, mode=mode))
    last: dict[str, Any] = {}
    for number in range(200):
        engine.add_request(*asks[number % 17], request_id=str(number))
        if number % 2:
            last |= engine.step()
            check_step(engine)
    last |= run(engine)
    assert engine.stats().num_finished == {"length": 200}
    assert engine.stats().num_preemptions > 10
    alone = make_m1()
    answers = [alone.generate(prompt, params).token_ids for prompt, params in asks]
    assert [last[str(number)].token_ids for number in range(200)] == [answers[number % 17] for number in range(200)]


def test_no_token_is_streamed_twice_or_lost_over_preemptions(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=7, block_size=2, mode=mode))
    streams = [engine.stream(ids(2, n), greedy(9)) for n in range(4)]
    for stream in streams:
        lengths = [len(output.token_ids) for output in stream]
        assert lengths == list(range(1, 10))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_output_tokens == 4 * 9
    check_drained(engine)


# --- the face ---------------------------------------------------------------------------------------------------------


def test_a_prompt_over_the_token_budget_is_refused_with_both_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, 20))
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(PromptTooLongError, match=r"21 prompt tokens.*max_num_batched_tokens is 20"):
            call(ids(21), greedy(2), request_id="long")
    assert not engine.has_unfinished_requests()
    assert len(engine.generate(ids(20), greedy(2), request_id="long").token_ids) == 2


def test_a_prompt_over_the_model_s_length_is_refused_with_both_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, block_size=16))
    with pytest.raises(PromptTooLongError, match=f"{MAX_MODEL_LEN} prompt tokens; max_model_len is {MAX_MODEL_LEN}"):
        engine.add_request(ids(MAX_MODEL_LEN), greedy(2))
    output = engine.generate(ids(MAX_MODEL_LEN - 1), greedy(9))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)


def test_the_limit_of_the_model_ends_each_request_for_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=16, **setting(4))
    outputs = engine.generate_batch([ids(n) for n in (3, 15, 8, 12, 15)], greedy(99))
    assert [len(output.token_ids) for output in outputs.values()] == [13, 1, 8, 4, 1]


def test_generate_streams_and_steps_share_the_batch(make_engine: MakeEngine, make_m1: Any) -> None:
    alone = make_m1()
    engine = make_engine(**setting(3, block_size=2))
    recorder = Recorder(engine.tracer)
    mine = engine.add_request(ids(4), greedy(12))
    stream, other = engine.stream(ids(6), greedy(5)), engine.stream(ids(2), greedy(9))
    assert len(next(stream).token_ids) == 1
    assert engine.generate(ids(7), greedy(3)).token_ids == alone.generate(ids(7), greedy(3)).token_ids
    assert [len(output.token_ids) for output in stream] == [2, 3, 4, 5]
    *_, last = other
    assert last.token_ids == alone.generate(ids(2), greedy(9)).token_ids
    assert run(engine)[mine].token_ids == alone.generate(ids(4), greedy(12)).token_ids
    assert max(len(batch.rids) for batch in recorder.events("batch")) == 3


def test_every_step_reports_every_request_that_got_a_token(engine: LLMEngine) -> None:
    for rid, max_tokens in (("a", 3), ("b", 1), ("c", 2)):
        engine.add_request(ids(3), greedy(max_tokens), request_id=rid)
    seen = [{rid: len(o.token_ids) for rid, o in engine.step().items()} for _ in unfinished(engine)]
    assert seen == [{"a": 1, "b": 1, "c": 1}, {"a": 2, "c": 2}, {"a": 3}]
    assert engine.step() == {}


def test_answers_come_in_order_of_submission_and_refused_ones_with_their_error(
    make_engine: MakeEngine, make_m1: Any
) -> None:
    engine = make_engine(**setting(2, 12, blocks=8))
    prompts: list[Any] = [ids(3), ids(13), "", ids(5), [10**6], ids(12)]
    outputs = engine.generate_batch(prompts, [greedy(n) for n in (9, 2, 2, 1, 2, 4)])
    assert list(outputs) == [f"req-{n}" for n in range(6)]
    assert [o.finish_reason for o in outputs.values()] == ["length", "error", "error", "length", "error", "length"]
    assert engine.stats().num_finished == {"length": 3}
    assert outputs["req-5"].token_ids == make_m1().generate(ids(12), greedy(4)).token_ids
    check_drained(engine)


def test_a_request_id_in_use_is_refused_and_free_after_its_end(engine: LLMEngine) -> None:
    engine.add_request(ids(3), greedy(2), request_id="mine")
    engine.add_request(ids(4), greedy(5), request_id="other")
    with pytest.raises(DuplicateRequestError, match="'mine'"):
        engine.add_request(ids(3), greedy(2), request_id="mine")
    engine.step()
    assert engine.step()["mine"].finished
    engine.add_request(ids(5), greedy(1), request_id="mine")
    assert run(engine)["mine"].prompt_token_ids == tuple(ids(5))


def test_stats_tell_what_is_reserved_shared_and_used(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, blocks=20))
    per_token = engine.engine_core._kv_holder.kv_bytes_per_token
    loaded = engine.engine_core.executor.worker.model_runner.model.config
    assert per_token == 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * 4
    engine.add_request(ids(6), greedy(3), request_id="a")
    engine.add_request(ids(5), greedy(4, n=2, temperature=1.0, seed=1), request_id="b")
    seen = []
    for _ in range(3):
        engine.step()
        stats = engine.stats()
        assert stats.kv_bytes == stats.kv_tokens * per_token
        assert stats.kv_bytes_reserved == (stats.num_blocks - stats.num_free_blocks) * 4 * per_token
        seen.append((stats.num_running, stats.kv_tokens, stats.num_free_blocks, stats.num_shared_blocks))
    assert seen == [
        (3, 6 + 5, 16, 1),  # a in 2 blocks, b/0 in 2; b/1 on the first of them, which holds its 4 tokens
        (3, 7 + (4 + 2 + 1), 15, 1),  # b/1 has a second block of its own
        (2, 4 + 3 + 2, 17, 1),  # a has left
    ]
    assert (engine.stats().num_prompt_tokens, engine.stats().num_output_tokens) == (11, 3 + 3 + 2)
    run(engine)
    assert engine.stats().num_output_tokens == 3 + 4 + 4


def test_closing_releases_all_blocks_here_and_on_the_host(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=5, block_size=2, mode=mode))
    for n in range(3):
        engine.add_request(ids(2, n), greedy(9))
    while not engine.stats().num_preemptions:
        engine.step()
    kv_manager = engine.engine_core.scheduler.kv_manager
    assert held(engine) > 0 and bool(kv_manager.swapped()) == (mode == "swap")
    engine.close()
    assert held(engine) == 0
    check_memory(engine)
    with pytest.raises(EngineClosedError):
        engine.step()


def test_a_trace_reader_cannot_call_the_engine_but_may_abort(engine: LLMEngine) -> None:
    calls = [
        OnEvent(engine.tracer, "batch", engine.step),
        OnEvent(engine.tracer, "batch", lambda: engine.add_request(ids(3))),
        OnEvent(engine.tracer, "batch", lambda: engine.generate_batch([ids(3)])),
    ]
    aborts = OnEvent(engine.tracer, "batch", lambda: engine.abort_request("b"))
    for rid in ("a", "b"):
        engine.add_request(ids(3), greedy(2), request_id=rid)
    assert {rid: output.finish_reason for rid, output in run(engine).items()} == {"a": "length", "b": "abort"}
    assert all(isinstance(call.error, EngineUsageError) for call in calls)
    assert aborts.result is True


def test_the_engine_runs_the_checkpoint_that_ships() -> None:
    """The default model behind the default configuration, and in as little memory as it can work in."""
    answers = []
    for cache in (CacheConfig(), CacheConfig(num_blocks=12)):
        with LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=3), cache_config=cache) as engine:
            prompts = [
                engine.chat_prompt([{"role": "user", "content": text}])
                for text in ("What is a KV cache?", "What is a token?", "What is a batch?")
            ]
            outputs = engine.generate_batch(prompts)
            assert [output.finish_reason for output in outputs.values()] == ["stop"] * 3
            answers.append([output.text for output in outputs.values()])
            check_drained(engine)
    assert answers[0] == answers[1] and all("token" in text for text in answers[0][:2])
