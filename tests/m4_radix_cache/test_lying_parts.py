"""Parts that break their word: the engine names them, ends whom that concerns, keeps the others, and leaks nothing.

Parts may be somebody's own (`parts={...}`), so what they say is material to check. A policy that lets nobody in would
otherwise be asked again in every step, and a row in the wrong place would become somebody's token.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache import KVCapacityError, LLMEngine, PartError
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.model_runner import ModelRunner
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from tests.m4_radix_cache.engines import MakeEngine, check_drained, greedy, run, setting
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

CHOICES: dict[str, Callable[[Any], Any]] = {
    "nobody": lambda running: None,
    "a stranger": lambda running: SimpleNamespace(request_id="stranger"),
    "an id": lambda running: running[0].request_id,
    "raises": lambda running: {}["victim"],
    "sorts in place": lambda running: running.sort(),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_policy_that_chooses_no_running_request_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], cache: str, choice: str
) -> None:
    class Liar:
        def choose_victim(self, running: Any) -> Any:
            return CHOICES[choice](running)

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
    "no order": lambda waiting: waiting,
    "loses one": lambda waiting: Order(waiting[1:], []),
    "loses all": lambda waiting: Order([], []),
    "names one twice": lambda waiting: Order([*waiting, waiting[0]], []),
    "one in place of another": lambda waiting: Order([waiting[0]] * len(waiting), []),
    "asks and holds back": lambda waiting: Order(waiting, waiting[:1]),
    "invents one": lambda waiting: Order([*waiting, SimpleNamespace(rid="ghost")], []),
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


def test_whatever_order_a_policy_names_the_answers_are_the_same(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    policy = policy_that(lambda waiting: Order(waiting[::-1], []))
    engine = make_engine({"schedule_policy": policy}, **setting(1))
    submit(engine)
    assert {rid: output.token_ids for rid, output in run(engine).items()} == expected


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


class RaisesForOne(PrefillAdder):
    """Cannot cope with a prompt of two tokens, and has locked something by then."""

    def add_one_req(self, req: Any) -> AddReqResult:
        result = super().add_one_req(req)
        if len(req.origin_input_ids) == 2:
            raise RuntimeError("a bug")
        return result


def check_all_ended(engine: Any, role: str, expected: dict[str, tuple[int, ...]]) -> None:
    """All requests end with an error that names the part, and the engine answers the next one."""
    outputs = run(engine)
    assert len(outputs) > 1
    for output in outputs.values():
        assert isinstance(output.error, PartError) and role in str(output.error) and "a bug" in str(output.error)
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"]
    check_drained(engine)


def test_an_adder_that_raises_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine({"prefill_adder": RaisesForOne}, **setting(4, policy="fcfs"))
    engine.add_request([5, 6, 7], greedy(9), request_id="runs")
    engine.step(), engine.step()
    for rid, prompt in {"before": [8], "asked": [9, 10], "behind": [11, 12, 13]}.items():
        engine.add_request(prompt, greedy(9), request_id=rid)
    check_all_ended(engine, "the part 'prefill_adder' (RaisesForOne)", expected)


def test_an_adder_that_cannot_be_made_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class CannotBeMade(PrefillAdder):
        def __init__(self, *, running: Any, **settings: Any) -> None:
            if running:
                raise RuntimeError("a bug")
            super().__init__(running=running, **settings)

    engine = make_engine({"prefill_adder": CannotBeMade}, **setting(4))
    engine.add_request([5, 6], greedy(4), request_id="runs")
    engine.step(), engine.step()
    engine.add_request([7], greedy(4), request_id="waits")
    check_all_ended(engine, "the part 'prefill_adder' (CannotBeMade)", expected)


@pytest.mark.parametrize("error", [StopIteration("a bug"), RuntimeError("a bug"), ValueError("a bug" * 10_000)])
def test_whatever_a_policy_raises_names_the_part_in_a_short_message(make_engine: MakeEngine, error: Exception) -> None:
    class Raises(SchedulePolicy):
        def calc_priority(self, *given: Any, **named: Any) -> Any:
            raise error

    engine = make_engine({"schedule_policy": Raises}, **setting(4))
    output = engine.generate([5, 6], greedy(4))
    assert isinstance(output.error, PartError) and "a bug" in str(output.error) and len(str(output.error)) < 500
    assert output.error.__cause__ is error and not engine.has_unfinished_requests()


def test_a_stop_checker_that_raises_at_the_start_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class Raises(StopChecker):
        def stop_ids(self, sequence: Any) -> frozenset[int]:
            if sequence.prompt_token_ids[0] == 9:
                raise RuntimeError("a bug")
            return super().stop_ids(sequence)

    engine = make_engine({"stop_checker": Raises}, **setting(4))
    engine.add_request([5, 6], greedy(4), request_id="runs")
    engine.step(), engine.step()
    engine.add_request([9, 7], greedy(4, min_tokens=2), request_id="starts")
    check_all_ended(engine, "the part 'stop_checker' (Raises)", expected)


# --- a prefix cache ---------------------------------------------------------------------------------------------------


class EvictsNothing(RadixCache):
    """Says what could be evicted, and never does it."""

    def evict(self, num_tokens: int) -> int:
        return 0


class EvictsOnPaper(EvictsNothing):
    """And says that it has."""

    def evict(self, num_tokens: int) -> int:
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


# --- a model runner ---------------------------------------------------------------------------------------------------


def rows(output: ModelRunnerOutput, order: list[int], **changes: Any) -> ModelRunnerOutput:
    """The same with these rows only, in this order."""
    return replace(
        output,
        req_ids=[output.req_ids[i] for i in order],
        sampled_token_ids=[output.sampled_token_ids[i] for i in order],
        logprobs=[output.logprobs[i] for i in order],
        **changes,
    )


def with_tokens(output: ModelRunnerOutput, tokens: Any) -> ModelRunnerOutput:
    """The same with other tokens in the second row."""
    return replace(output, sampled_token_ids=[output.sampled_token_ids[0], tokens, *output.sampled_token_ids[2:]])


def lying_runner(lie: Callable[[ModelRunnerOutput], Any], step: int) -> type[ModelRunner]:
    """A runner that lies about this step."""
    steps: list[int] = []

    class Liar(ModelRunner):
        def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
            output = super().execute_model(batch)
            steps.append(1)
            return lie(output) if len(steps) == step else output

    return Liar


@pytest.mark.parametrize("step", [1, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda output: rows(output, [0, 2]), "returned 0 rows for request {b}"),
        (lambda output: rows(output, [0, 1, 1, 2]), "returned 2 rows for request {b}"),
        (lambda output: with_tokens(output, [None]), "returned [None] for request {b}"),
    ],
    ids=["dropped", "twice", "none"],
)
def test_a_row_that_cannot_be_used_fails_its_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], lie: Any, message: str, step: int
) -> None:
    second: list[str] = []

    def told(output: ModelRunnerOutput) -> Any:
        second.append(output.req_ids[1])
        return lie(output)

    engine = make_engine({"model_runner": lying_runner(told, step)}, **setting(3))
    submit(engine)
    outputs = run(engine)
    (victim,) = second
    assert isinstance(outputs[victim].error, PartError)
    assert message.format(b=repr(victim)) in str(outputs[victim].error) and "model runner" in str(outputs[victim].error)
    assert outputs[victim].token_ids == expected[victim][: step - 1]
    others = {rid: output.token_ids for rid, output in outputs.items() if rid != victim}
    assert others == {rid: tokens for rid, tokens in expected.items() if rid != victim}


@pytest.mark.parametrize("step", [1, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda output: None, "returned None, which is not a ModelRunnerOutput"),
        (lambda output: replace(output, req_ids=["ghost", *output.req_ids[1:]]), "a row for 'ghost', which is not in"),
        (lambda output: replace(output, req_ids=output.req_ids[:-1]), "2 ids, 3 rows of tokens and 3 of logprobs"),
    ],
    ids=["nothing", "a stranger", "an id too few"],
)
def test_rows_of_which_nobody_can_say_whose_they_are_fail_their_step(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], lie: Any, message: str, step: int
) -> None:
    engine = make_engine({"model_runner": lying_runner(lie, step)}, **setting(3))
    submit(engine)
    outputs = run(engine)
    for rid, output in outputs.items():
        assert isinstance(output.error, PartError) and message in str(output.error)
        assert output.token_ids == expected[rid][: step - 1]
    assert engine.generate(PROMPTS["b"], greedy(NUM_TOKENS)).token_ids == expected["b"]
    check_drained(engine)


def test_the_order_of_rows_is_the_runners_own_affair(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class Backwards(ModelRunner):
        def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
            output = super().execute_model(batch)
            return rows(output, list(range(len(output.req_ids)))[::-1])

    engine = make_engine({"model_runner": Backwards}, **setting(3))
    submit(engine)
    assert {rid: output.token_ids for rid, output in run(engine).items()} == expected
