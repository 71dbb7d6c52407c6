"""Parts that break their word: the engine names them, ends whom that concerns, keeps the others, and leaks nothing.

Parts may be somebody's own (`parts={...}`), so what they say is material to check. A policy that lets nobody in would
otherwise be asked again in every step, and a row in the wrong place would become somebody's token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from m1_single_request.stop_checker import StopChecker
from m4_radix_cache import KVCapacityError, LLMEngine, PartError
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from tests.m4_radix_cache.engines import MakeEngine, check_drained, greedy, run, setting
from tests.support.victims import INVALID_VICTIMS
from tests.testbed.radix import make_radix_bed

PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51]}
NUM_TOKENS = 12


@pytest.fixture
def expected(make_m1: Any) -> dict[str, tuple[int, ...]]:
    """What everybody gets from honest parts."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(NUM_TOKENS)).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: LLMEngine) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=rid)


# --- a preemption policy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", INVALID_VICTIMS)
def test_a_policy_that_chooses_no_running_request_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], cache: str, choice: str
) -> None:
    class Liar:
        def choose_victim(self, running: Any) -> Any:
            return INVALID_VICTIMS[choice](running)

    engine = make_engine(
        {"preemption": Liar}, **setting(2, tokens=24, page_size=2, cache=cache, conservativeness=0, policy="fcfs")
    )
    engine.add_request(PROMPTS["a"], greedy(NUM_TOKENS), request_id="a")
    engine.step()
    for rid in "bc":
        engine.add_request(PROMPTS[rid], greedy(NUM_TOKENS), request_id=rid)
    outputs = run(engine)
    for rid, output in outputs.items():
        assert isinstance(output.error, PartError) and "the part 'preemption' (Liar)" in str(output.error)
        assert output.token_ids == expected[rid][: len(output.token_ids)]
    assert [bool(outputs[rid].token_ids) for rid in "abc"] == [True, True, False]
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"]
    check_drained(engine)


# --- a schedule policy ------------------------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[list[Any]], Any]] = {
    "raises": lambda waiting: {}["order"],
    "nothing": lambda waiting: None,
    "loses one": lambda waiting: Order(waiting[1:], []),
    "names one twice": lambda waiting: Order([*waiting, waiting[0]], []),
    "asks and holds back": lambda waiting: Order(waiting, waiting[:1]),
    "takes them away": lambda waiting: Order([waiting.pop() for _ in waiting[1:]], []),
}


def policy_that(lies: Callable[[list[Any]], Any], *, after: int = 0) -> type[SchedulePolicy]:
    """A policy that lies from some round on."""

    class Liar(SchedulePolicy):
        count = 0

        def calc_priority(self, waiting: Any) -> Any:
            self.count += 1
            return lies(waiting) if self.count > after else super().calc_priority(waiting)

    return Liar


@pytest.mark.parametrize("order", ORDERS)
def test_a_policy_that_does_not_order_those_who_wait_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], order: str
) -> None:
    engine = make_engine({"schedule_policy": policy_that(ORDERS[order], after=1)}, **setting(3))
    engine.add_request(PROMPTS["a"], greedy(NUM_TOKENS), request_id="a")
    engine.step()
    for rid in "bc":
        engine.add_request(PROMPTS[rid], greedy(NUM_TOKENS), request_id=rid)
    outputs = run(engine)
    for rid, output in outputs.items():
        assert output.finish_reason == "error" and output.token_ids == expected[rid][: len(output.token_ids)]
        assert isinstance(output.error, PartError) and "'schedule_policy' (Liar)" in str(output.error)
    assert outputs.keys() == PROMPTS.keys()


@pytest.mark.parametrize("runs", [False, True], ids=["nobody runs", "somebody runs"])
def test_a_policy_that_holds_everybody_back_is_no_endless_loop(make_engine: MakeEngine, runs: bool) -> None:
    policy = policy_that(lambda waiting: Order([], waiting), after=int(runs))
    engine = make_engine({"schedule_policy": policy}, **setting(3))
    if runs:
        engine.add_request(PROMPTS["a"], greedy(NUM_TOKENS), request_id="a")
        engine.step()
    engine.add_request(PROMPTS["b"], greedy(NUM_TOKENS), request_id="b")
    outputs = run(engine)
    assert isinstance(outputs["b"].error, PartError) and "admit no request, and none runs" in str(outputs["b"].error)
    assert not runs or outputs["a"].finish_reason == "length"


# --- an adder ---------------------------------------------------------------------------------------------------------


class AdmitsNobody(PrefillAdder):
    """Says that another one may be tried, and takes none."""

    def add_one_req(self, req: Any) -> AddReqResult:
        return AddReqResult.CONTINUE


class FullAtOnce(PrefillAdder):
    def add_one_req(self, req: Any) -> AddReqResult:
        return AddReqResult.OTHER


class AdmitsEverybody(PrefillAdder):
    """Takes more than there is room for."""

    def add_one_req(self, req: Any) -> AddReqResult:
        self.tree_cache.inc_lock_ref(req.last_node)
        self.can_run_list.append(req)
        return AddReqResult.CONTINUE


@pytest.mark.parametrize("adder", [AdmitsNobody, FullAtOnce, AdmitsEverybody], ids=lambda adder: adder.__name__)
@pytest.mark.parametrize("limits", [{"tokens": 8}, {"max_num_seqs": 1}], ids=["memory", "places"])
def test_an_adder_that_cannot_count_is_no_endless_loop(
    make_engine: MakeEngine, adder: type, limits: dict[str, int]
) -> None:
    engine = make_engine({"prefill_adder": adder}, **setting(**limits, page_size=2))
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(2), request_id=rid)
    outputs = run(engine)
    assert all(isinstance(output.error, PartError) for output in outputs.values())


class CannotBeMade(PrefillAdder):
    def __init__(self, *, running: Any, **settings: Any) -> None:
        if running:
            raise RuntimeError("a bug")
        super().__init__(running=running, **settings)


class RaisesForOne(PrefillAdder):
    """Cannot cope with a prompt of two tokens, and has locked something by then."""

    def add_one_req(self, req: Any) -> AddReqResult:
        result = super().add_one_req(req)
        if len(req.origin_input_ids) == 2:
            raise RuntimeError("a bug")
        return result


class RaisesAtTheStart(StopChecker):
    def stop_ids(self, sequence: Any) -> frozenset[int]:
        if sequence.prompt_token_ids[0] == 9:
            raise RuntimeError("a bug")
        return super().stop_ids(sequence)


RAISING = [("prefill_adder", CannotBeMade), ("prefill_adder", RaisesForOne), ("stop_checker", RaisesAtTheStart)]


@pytest.mark.parametrize(("role", "part"), RAISING)
def test_a_part_that_raises_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], role: str, part: type
) -> None:
    engine = make_engine({role: part}, **setting(4, policy="fcfs"))
    engine.add_request([5, 6, 7], greedy(9), request_id="runs")
    engine.step(), engine.step()
    for rid, prompt in {"before": [8], "asked": [9, 10], "behind": [11, 12, 13]}.items():
        engine.add_request(prompt, greedy(9, min_tokens=2), request_id=rid)
    outputs = run(engine)
    assert outputs.keys() == {"runs", "before", "asked", "behind"}
    for output in outputs.values():
        assert isinstance(output.error, PartError) and "a bug" in str(output.error)
        assert f"the part '{role}' ({part.__name__})" in str(output.error)
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"]
    check_drained(engine)


# --- a prefix cache ---------------------------------------------------------------------------------------------------


class EvictsNothing(RadixCache):
    """Says what could be evicted, and never does it."""

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        return 0


class EvictsOnPaper(EvictsNothing):
    """And says that it has."""

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        return num_tokens


@pytest.mark.parametrize("cache_class", [EvictsNothing, EvictsOnPaper], ids=lambda one: one.__name__)
def test_a_cache_that_frees_nothing_when_a_prompt_needs_room_fails_those_who_were_counted_in(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], cache_class: type
) -> None:
    engine = make_engine({"prefix_cache": cache_class}, **setting(2, tokens=20, page_size=2))
    engine.generate([*range(60, 72)], greedy(4))
    engine.add_request([*range(80, 86)], greedy(4), request_id="too much")
    engine.add_request(PROMPTS["c"], greedy(2), request_id="c")
    outputs = run(engine)
    assert isinstance(outputs["too much"].error, PartError)
    assert "the KV memory has no room for them" in str(outputs["too much"].error)
    assert outputs["c"].finish_reason in ("length", "error")
    engine.flush_cache()
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"], "until it is full again"


@pytest.mark.parametrize("cache_class", [EvictsNothing, EvictsOnPaper], ids=lambda one: one.__name__)
def test_a_cache_that_frees_nothing_when_a_decode_needs_room_ends_with_an_error_each(cache_class: type) -> None:
    bed = make_radix_bed(num_tokens=16, cache_class=cache_class, conservativeness=0, checked=False)
    bed.add(6, max_tokens=2), bed.drain()
    bed.add(2, max_tokens=8), bed.step()
    bed.add(2, max_tokens=8)
    ended = bed.drain(limit=100)
    assert set(ended.values()) <= {"length", "error"} and "error" in ended.values()
    for rid, reason in ended.items():
        assert reason != "error" or isinstance(bed.error_of(rid), KVCapacityError | PartError)


@pytest.mark.parametrize("verb", ["match_prefix", "insert", "inc_lock_ref", "dec_lock_ref", "evict"])
def test_a_cache_that_raises_is_a_bug_that_the_engine_survives(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], verb: str
) -> None:
    """As m3's KV manager: all requests end with an error that names the part, and the memory is empty."""
    left = [ValueError("a bug")]

    def raises(self: Any, *args: Any) -> Any:
        if left and len(self.token_to_kv_pool_allocator.owned_pages()) > 3:
            raise left.pop()
        return getattr(RadixCache, verb)(self, *args)

    engine = make_engine(
        {"prefix_cache": type("Buggy", (RadixCache,), {verb: raises})},
        **setting(3, tokens=30, page_size=2, policy="fcfs"),
    )
    submit(engine)
    outputs = run(engine)
    ended = {rid: output for rid, output in outputs.items() if output.error is not None}
    assert ended and not left
    for rid, output in outputs.items():
        assert output.token_ids == expected[rid][: len(output.token_ids)]
        assert rid not in ended or (isinstance(output.error, PartError) and "a bug" in str(output.error))
        assert rid in ended or output.finish_reason == "length"
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"]
    check_drained(engine)
