"""m3 behind the face of m1: requests share steps and memory, are preempted and resumed, and their tokens stay the same.

What the face promises whatever runs behind it is tested with m1, and what all batches have in common in
`tests/engine_contract`; here is what blocks change.
"""

import dataclasses

import pytest
import torch

from m3_paged_attention import EngineClosedError
from tests.m3_paged_attention.engines import MakeEngine, check_memory, greedy, held, ids, run, setting

# --- the worked example -----------------------------------------------------------------------------------------------


def test_a_step_is_one_forward_whatever_it_mixes(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4))
    runner = engine.engine_core.executor.worker.model_runner
    shapes: list[tuple[int, int]] = []
    forward = runner.forward
    runner.forward = lambda model_input: (
        shapes.append((len(model_input.input_ids), len(model_input.attn_metadata.seq_lens))) or forward(model_input)
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
            kv.blocks[:, block] = block
        kv.host_blocks[:] = 10
    decision = engine.engine_core.scheduler.schedule()
    nothing = dataclasses.replace(decision, scheduled_new_reqs=[], num_scheduled_tokens={})
    moves = {"blocks_to_swap_in": [(0, 3)], "blocks_to_swap_out": [(3, 1), (1, 2)], "blocks_to_copy": [(2, 1), (4, 2)]}
    engine.engine_core.executor.execute_model(dataclasses.replace(nothing, **moves))
    assert [kv.blocks[0, block].unique().tolist() for block in range(5)] == [[0], [2], [4], [10], [4]]
    assert [kv.host_blocks[block].unique().tolist() for block in range(3)] == [[10], [10], [1]]
    run(engine)


# --- the face ---------------------------------------------------------------------------------------------------------


def test_stats_tell_what_is_reserved_shared_and_used(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, blocks=20))
    per_token = engine.engine_core.kv_bytes_per_token
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
