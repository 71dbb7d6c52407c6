"""What slots and padding change behind the face of m1.

What all batches have in common is tested in `tests/engine_contract`.
"""

import pytest

from m2_continuous_batching import InvalidParamsError, LLMEngine
from tests.m2_continuous_batching.engines import MAX_MODEL_LEN, MakeEngine, greedy, limits, run
from tests.support.engines import ids

# --- requests that can never run --------------------------------------------------------------------------------------


def test_several_outputs_are_refused_with_the_milestone_that_brings_them(engine: LLMEngine) -> None:
    with pytest.raises(InvalidParamsError, match="m3_paged_attention"):
        engine.add_request(ids(3), greedy(2, n=2))


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_count_work_and_waste(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(4))
    per_token = engine.engine_core.kv_bytes_per_token
    reserved = 4 * MAX_MODEL_LEN * per_token
    stats = engine.stats()
    assert (stats.useful_tokens, stats.padded_tokens, stats.kv_bytes_reserved) == (0, 0, reserved)
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
