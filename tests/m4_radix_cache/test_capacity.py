"""How many requests may come and run at once. Requests that outgrow the memory: `tests/engine_contract`."""

import pytest

from m4_radix_cache import KVCapacityError
from tests.m4_radix_cache.engines import MakeEngine, check_drained, greedy, ids, setting


def test_a_prompt_over_the_whole_pool_is_refused_with_all_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, tokens=12))
    with pytest.raises(KVCapacityError, match=r"'big' has 11 prompt tokens.* room for 12, .* must leave 2 of them"):
        engine.add_request(ids(11), greedy(2), request_id="big")
    assert engine.generate(ids(10), greedy(1)).finish_reason == "length"


def test_as_many_may_run_as_anybody_likes(make_engine: MakeEngine) -> None:
    """Rows are made when they are needed; memory decides how many that are."""
    engine = make_engine(**setting(10**12))
    outputs = engine.generate_batch([[5 + n % 90, 6 + n % 7] for n in range(200)], greedy(2), progress=False)
    assert all(len(output.token_ids) == 2 for output in outputs.values())
    check_drained(engine)
