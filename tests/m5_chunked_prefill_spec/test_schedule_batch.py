"""The living batch with pieces, decodes and guesses: what a step needs of it, what it takes, and what it gives back."""

from collections.abc import Sequence
from typing import Any

import pytest

from m1_single_request.errors import PartError
from m1_single_request.request import RequestStatus
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from tests.m4_radix_cache.batches import SETTINGS, check_columns, extend, pools_of, req_of
from tests.m4_radix_cache.caches import make_cache


def make_pools(*, page_size: int = 1, num_pages: int = 64, num_rows: int = 8) -> Pools:
    cache = make_cache(page_size=page_size, num_pages=num_pages)
    cache.req_to_token_pool = ReqToTokenPool(size=num_rows, max_context_len=256)
    return pools_of(cache)


def req_with(pools: Pools, rid: str, length: int, **params: Any) -> Req:
    """An admitted request with a prompt of this length, of which nothing is cached."""
    prompt = [30 + (ord(rid[0]) * 13 + i) % 90 for i in range(length)]
    return req_of(pools, rid, prompt, **{"max_tokens": 30} | params)


def prefilling(pools: Pools, *reqs: tuple[Req, int] | Req) -> ScheduleBatch:
    """A batch that prefills these requests; of some only so many tokens."""
    for one in reqs:
        if isinstance(one, tuple):
            one[0].extend_input_len = one[1]
    batch: ScheduleBatch = extend(pools, [one[0] if isinstance(one, tuple) else one for one in reqs], ScheduleBatch)
    for req in batch.reqs:
        req.status = RequestStatus.RUNNING
    return batch


def say(batch: ScheduleBatch, said: dict[str, Sequence[int]]) -> None:
    """What the scheduler does when a step's tokens come: commit prompts, pieces and right guesses, and roll back."""
    output = ModelRunnerOutput(list(said), [list(t) for t in said.values()], [[None] * len(t) for t in said.values()])
    for run in batch.take_runs(output):
        for token_id in run.token_ids:
            run.req.sequence.add_token_id(token_id)
        run.req.kv_committed_len = run.req.seqlen - 1
        if run.place < batch.num_prompts:
            batch.pools.tree_cache.cache_unfinished_req(run.req)
    if batch.chunked_req is not None:
        batch.chunked_req.kv_committed_len += batch.chunked_req.extend_input_len
        batch.pools.tree_cache.cache_unfinished_req(batch.chunked_req)
    batch.roll_back()


def decoding(pools: Pools, lens: dict[str, int], **params: Any) -> ScheduleBatch:
    """A batch of requests with prompts of these lengths that have said one token each."""
    batch = prefilling(pools, *(req_with(pools, rid, length, **params) for rid, length in lens.items()))
    say(batch, {rid: [60 + number] for number, rid in enumerate(batch.rids)})
    return batch


def check_step(batch: ScheduleBatch, *rids: str) -> None:
    """And in a step, every array of tokens one for each new token."""
    check_columns(batch, *rids)
    assert len(batch.new_lens) == len(rids) and len(batch.drafts) in (0, len(rids))
    assert len(batch.input_ids) == len(batch.out_cache_loc) == batch.new_lens.sum()
    told = batch.get_model_worker_batch()
    assert len(told.sample_lens) == len(rids)
    rows, first = batch.pools.req_to_token_pool, 0
    for req, new, seq_len in zip(batch.reqs, batch.new_lens.tolist(), batch.seq_lens.tolist(), strict=True):
        slots = rows.read(req.req_pool_idx, seq_len - new, seq_len)  # type: ignore[arg-type]
        assert batch.out_cache_loc[first : first + new].tolist() == slots.tolist()
        first += new


# --- prompts and their pieces -----------------------------------------------------------------------------------------


def test_rows_are_given_where_one_is_missing_and_nobody_else() -> None:
    pools = make_pools(num_rows=3)
    first = req_with(pools, "a", 20)
    say(prefilling(pools, (first, 10)), {})
    row = first.req_pool_idx
    first.extend_input_len = 10
    batch = prefilling(pools, first, req_with(pools, "b", 5), (req_with(pools, "c", 9), 4))
    check_step(batch, "a", "b", "c")
    assert first.req_pool_idx == row and len(set(batch.req_pool_indices.tolist())) == 3
    assert pools.req_to_token_pool.available_size() == 0
    assert batch.chunked_req is not None and batch.chunked_req.rid == "c"
    assert batch.get_model_worker_batch().sample_lens == [1, 1, 0]


def test_two_prompts_in_pieces_are_a_bug() -> None:
    pools = make_pools()
    with pytest.raises(AssertionError, match="two prompts are in pieces"):
        prefilling(pools, (req_with(pools, "a", 20), 5), (req_with(pools, "b", 20), 5))


def test_a_batch_that_finds_no_room_takes_nothing_and_the_prompt_in_pieces_keeps_what_it_has() -> None:
    pools = make_pools(num_pages=20)
    first = req_with(pools, "a", 30)
    say(prefilling(pools, (first, 10)), {})
    available = pools.token_to_kv_pool_allocator.available_size(), pools.req_to_token_pool.available_size()
    first.extend_input_len = 8
    with pytest.raises(PartError, match="2 requests were admitted, and the KV memory has no room for them"):
        prefilling(pools, first, req_with(pools, "b", 5))
    assert (pools.token_to_kv_pool_allocator.available_size(), pools.req_to_token_pool.available_size()) == available
    assert (first.kv_committed_len, first.kv_allocated_len) == (10, 10)


# --- decodes with guesses ---------------------------------------------------------------------------------------------


def test_room_for_guesses_is_made_by_eviction_or_there_is_none() -> None:
    pools = make_pools(num_pages=12)
    batch = decoding(pools, {"a": 6})
    assert batch.pages_for([[80] * 5]) == 6 and batch.has_room_for([[80] * 5])
    assert not batch.has_room_for([[80] * 6])


def test_who_had_no_guesses_gives_nothing_back_and_who_left_is_left_alone() -> None:
    pools = make_pools()
    batch = decoding(pools, {"a": 6, "b": 6, "c": 6})
    batch.prepare_for_decode([[91], [], [91, 92]])
    rows = zip(batch.reqs, [[70], [70], [70, 71]], strict=True)
    output = ModelRunnerOutput(batch.rids, [[70], [70], [70, 71]], [[None], [None], [None, None]])
    batch.take_runs(output)
    for req, said in rows:
        for token_id in said:
            req.sequence.add_token_id(token_id)
        req.kv_committed_len = req.seqlen - 1
    pools.tree_cache.cache_finished_req(batch.reqs[0])
    assert [(req.rid, num) for req, num in batch.roll_back()] == [("c", 1)]
    assert batch.roll_back() == [], "once"


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "decodes"), list(zip(SETTINGS, SETTINGS[::-1], strict=True)), ids=str)
@pytest.mark.parametrize("drafts", [(), [[81, 82], []]], ids=["plain", "guesses"])
def test_in_a_mixed_step_prompts_stand_in_front_and_every_array_is_as_long_as_the_batch(
    prompts: dict[str, Any], decodes: dict[str, Any], drafts: Any
) -> None:
    pools = make_pools(page_size=4)
    running = decoding(pools, {"d": 9, "e": 3}, **decodes)
    running.prepare_for_decode(drafts)
    batch = prefilling(pools, req_with(pools, "a", 7, **prompts), (req_with(pools, "b", 20, **prompts), 6))
    batch.mix_with_running(running)
    check_step(batch, "a", "b", "d", "e")
    assert batch.forward_mode is ForwardMode.MIXED and batch.num_prompts == 2
    told = batch.get_model_worker_batch()
    assert told.sample_lens == ([1, 0, 3, 1] if drafts else [1, 0, 1, 1])
    assert told.prefix_lens == [0, 0, 9, 3] and told.extend_lens == batch.new_lens.tolist()
    say(batch, {"a": [70], "d": [81, 71] if drafts else [71], "e": [72]})
    check_columns(batch, "a", "b", "d", "e")
    assert [req.kv_committed_len for req in batch.reqs] == [7, 6, 11 if drafts else 10, 4]
    batch.filter_batch([0, 2, 3])  # as the scheduler does: whoever is in pieces waits for its next one alone
    batch.prepare_for_decode()
    check_step(batch, "a", "d", "e")
    assert batch.input_ids.tolist() == [70, 71, 72]


def test_tokens_may_come_in_any_order_and_are_taken_in_that_of_the_batch() -> None:
    pools = make_pools()
    batch = decoding(pools, {"a": 5, "b": 6, "c": 7, "d": 8})
    batch.prepare_for_decode([[81], [], [82, 83], []])
    output = ModelRunnerOutput(["d", "c", "a"], [[4], [82, 3], [2]], [[None], [None, None], [None]])
    runs = batch.take_runs(output)
    assert [(run.place, run.req.rid, run.token_ids) for run in runs] == [
        (0, "a", [2]),
        (2, "c", [82, 3]),
        (3, "d", [4]),
    ]
    assert batch.output_ids.tolist() == [2, 0, 3, 4], "the newest of each; b got none"
    assert batch.sampling_info is not None and batch.sampling_info.positions.tolist() == [2, 1, 3, 2]
