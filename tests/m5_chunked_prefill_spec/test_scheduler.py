"""The scheduler of pieces and mixed steps by example: who runs, with how many tokens, and who waits for whom.

Every step runs on the test-bed: an oracle reads every slot of KV that a request uses, and every page, lock, row and
budget is checked. What is asserted here comes on top. What befalls a request in pieces has a file of its own
(`test_chunked_req.py`), and so has admission (`test_admission.py`).
"""

from typing import Any

import pytest

from tests.testbed.pieces import PiecesBed, make_pieces_bed

SCHEDULES = pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])


def modes(bed: PiecesBed) -> str:
    """The steps so far, a letter each."""
    letters = {"extend": "E", "decode": "D", "target_verify": "V", "mixed": "M", "none": "-"}
    return "".join(letters[decision.mode] for decision in bed.decisions)


# --- a prompt in pieces -----------------------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize(
    "limits",
    [{"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 64, "chunked_prefill_size": 32}],
    ids=["budget", "chunk"],
)
def test_a_prompt_of_100_tokens_runs_in_pieces_of_32_and_is_sampled_once(schedule: Any, limits: Any) -> None:
    bed = make_pieces_bed(schedule=schedule, page_size=4, trace=True, tensors=True, **limits)
    bed.add(100, max_tokens=3)
    for start in (0, 32, 64):
        step = bed.step()
        assert step.output.chunked == "r0" and step.output.hits == {"r0": start}
        assert step.changed == [] and bed.said("r0") == (), "no token comes of a piece"
        assert bed.reqs["r0"].kv_committed_len == start + 32
    assert bed.step().changed == ["r0"] and len(bed.said("r0")) == 1
    assert bed.pieces_of("r0") == [32, 32, 32, 4]
    assert modes(bed) == "EEEE"
    cuts = [(cut.asked, cut.given, cut.start, cut.total) for cut in bed.events("chunk_cut")]
    assert cuts == [(100, 32, 0, 100), (68, 32, 32, 100), (36, 32, 64, 100)]
    bound_by = "chunked_prefill_size" if "chunked_prefill_size" in limits else "max_num_batched_tokens"
    assert {cut.bound_by for cut in bed.events("chunk_cut")} == {bound_by}
    bed.drain()
    assert modes(bed) == "EEEEDD" and len(bed.events("result")) == 3


def test_a_piece_ends_anywhere_if_decodes_go_first_and_at_a_page_if_prompts_do() -> None:
    pieces = {}
    for schedule in ("decode_first", "prefill_first"):
        bed = make_pieces_bed(schedule=schedule, page_size=16, max_num_batched_tokens=50)
        bed.add(101), bed.drain()
        pieces[schedule] = bed.pieces_of("r0")
    assert pieces == {"decode_first": [50, 50, 1], "prefill_first": [48, 48, 5]}


@SCHEDULES
def test_a_prompt_is_not_cut_where_that_is_switched_off(schedule: Any) -> None:
    bed = make_pieces_bed(schedule=schedule, max_num_batched_tokens=32, enable_chunked_prefill=False, trace=True)
    bed.add(20), bed.add(20), bed.drain()
    assert bed.pieces_of("r0") == bed.pieces_of("r1") == [20] and not bed.events("chunk_cut")


@pytest.mark.parametrize(("length", "waits"), [(29, False), (30, False), (31, True), (32, True)])
def test_without_chunks_a_prompt_waits_until_decodes_leave_room_for_all_of_it(length: int, waits: bool) -> None:
    """Of a budget of 32 two decodes leave 30: a step is packed to the last token, and holds no more."""
    bed = make_pieces_bed(max_num_batched_tokens=32, enable_chunked_prefill=False)
    bed.add(5, max_tokens=4), bed.add(5, max_tokens=6), bed.step()
    bed.add(length, max_tokens=3), bed.add(3, max_tokens=3)
    step = bed.step().output
    if not waits:
        assert step.prompts == {"r2": length} | ({"r3": 3} if length + 3 <= 30 else {})
    while "r2" in bed.waiting():
        assert step.prompts == {}, "nobody is let in before it"
        step = bed.step().output
    assert len(bed.decisions) == {29: 2, 30: 2, 31: 5, 32: 7}[length], "it runs once one of them, or both, have ended"
    assert step.prompts["r2"] == length and step.total <= 32
    bed.drain()


def test_without_chunks_whoever_has_grown_past_the_budget_runs_in_a_step_of_its_own() -> None:
    bed = make_pieces_bed(max_num_batched_tokens=16, enable_chunked_prefill=False, prefix_cache="chunk")
    bed.add(2, max_tokens=12), bed.step()
    bed.add(12, max_tokens=10)
    for _ in range(6):
        bed.step()
    bed.pools.due = 1
    bed.step(), bed.pools.release()
    assert bed.retracted() == ["r1"], "the one that has said least"
    bed.add(3, max_tokens=4)
    while "r0" not in bed.ended:
        assert bed.step().output.decodes == ("r0",) and bed.waiting() == ["r1", "r2"], "whoever came back goes first"
    step = bed.step().output
    assert (step.prompts, step.decodes) == ({"r1": 18}, ()), "more than the budget, and nothing else"
    assert bed.step().output.num_scheduled_tokens == {"r2": 3, "r1": 1}
    bed.drain()


def test_the_next_piece_goes_before_whoever_waits_and_newcomers_take_what_it_leaves() -> None:
    bed = make_pieces_bed(max_num_batched_tokens=32)
    bed.add(40), bed.add(30), bed.add(10)
    assert [bed.step().output.prompts for _ in range(3)] == [{"r0": 32}, {"r0": 8, "r1": 24}, {"r1": 6, "r2": 10}]
    bed.drain()


# --- what is shared ---------------------------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_the_pieces_of_a_prompt_are_there_for_others_before_its_last_one_is(schedule: Any, prefix_cache: str) -> None:
    bed = make_pieces_bed(schedule=schedule, prefix_cache=prefix_cache, page_size=4, max_num_batched_tokens=32)
    bed.add(70, max_tokens=5)
    bed.step(), bed.step()
    bed.add(60, max_tokens=2, same_as="r0")
    step = bed.step()
    assert step.output.prompts == {"r0": 6, "r1": 4}, "in the step of the last piece"
    assert step.output.hits == {"r0": 64, "r1": 56}
    bed.drain()


@pytest.mark.parametrize("schedule_policy", ["fcfs", "lpm", "lof"])
def test_siblings_wait_for_the_prompt_that_one_of_them_is_completing(schedule_policy: str) -> None:
    bed = make_pieces_bed(schedule_policy=schedule_policy, max_num_batched_tokens=16, max_num_seqs=4)
    bed.add(40, n=3, max_tokens=2)
    assert [bed.step().output.prompts for _ in range(3)] == [{"r0/0": 16}, {"r0/0": 16}, {"r0/0": 8}]
    assert bed.step().output.prompts == {"r0/1": 1, "r0/2": 1}, "and then compute one token each"
    bed.drain()
    assert bed.runner.num_written == 40 + 1 + 1 + 3 * 1


@pytest.mark.parametrize("schedule_policy", ["lpm", "dfs-weight"])
def test_strangers_with_the_same_prefix_wait_for_the_prompt_that_is_being_completed(schedule_policy: Any) -> None:
    """A hit on the first pieces is not waited for, if it is long; here the first piece is short."""
    bed = make_pieces_bed(schedule_policy=schedule_policy, max_num_batched_tokens=20, page_size=4)
    bed.add(38, max_tokens=2), bed.step()
    bed.add(38, same_as="r0", max_tokens=2), bed.add(9, max_tokens=2)
    assert bed.step().output.prompts == {"r0": 18, "r2": 2}, "r2 shares nothing"
    assert bed.step().output.prompts["r1"] == 2
    bed.drain()


def test_cached_tokens_of_a_request_in_pieces_are_those_that_others_computed() -> None:
    bed = make_pieces_bed(page_size=4, max_num_batched_tokens=16)
    bed.add(20, max_tokens=1), bed.drain()
    bed.add(60, same_as="r0", max_tokens=1), bed.drain()
    assert bed.pieces_of("r1") == [16, 16, 8]
    assert bed.reqs["r1"].cached_tokens == bed.scheduler.num_cached_tokens == 20, "not its own pieces"
