"""Parts that break their word: the engine names them, ends whom that concerns, keeps the others, and leaks nothing.

Parts may be somebody's own (`parts={...}`), so what they say is material to check. A policy that chooses nobody would
otherwise be asked again in every step, and a row in the wrong place would become somebody's token.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from m3_paged_attention import ConfigError, LLMEngine, ModelConfig, PartError
from m3_paged_attention.executor import checked
from m3_paged_attention.model_runner import ModelRunner
from m3_paged_attention.outputs import LogprobRow, ModelRunnerOutput
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.m3_paged_attention.engines import MakeEngine, check_drained, greedy, run, setting

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
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str, choice: str
) -> None:
    class Liar:
        def choose_victim(self, running: Any) -> Any:
            return CHOICES[choice](running)

    engine = make_engine({"preemption": Liar}, **setting(2, blocks=8, block_size=2, mode=mode))
    submit(engine)
    outputs = run(engine)
    for rid, output in outputs.items():
        assert isinstance(output.error, PartError) and "the part 'preemption' (Liar)" in str(output.error)
        assert output.token_ids == expected[rid][: len(output.token_ids)]
    assert [bool(outputs[rid].token_ids) for rid in "abc"] == [True, True, False]
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS)).token_ids == expected["a"]
    check_drained(engine)


def test_a_policy_that_fails_after_it_has_chosen_one_ends_that_one_too(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str
) -> None:
    """The first victim waits already, perhaps with its blocks on the way to the host."""

    class OnlyOnce:
        def __init__(self) -> None:
            self.count = 0

        def choose_victim(self, running: Any) -> Any:
            self.count += 1
            return running[0] if self.count == 1 else None

    engine = make_engine({"preemption": OnlyOnce}, **setting(3, blocks=9, block_size=2, mode=mode))
    submit(engine)
    outputs = run(engine)
    assert {output.finish_reason for output in outputs.values()} == {"error"}
    assert all(output.token_ids == expected[rid][: len(output.token_ids)] for rid, output in outputs.items())
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
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            output = super().execute_model(scheduler_output)
            steps.append(1)
            return lie(output) if len(steps) == step else output

    return Liar


@pytest.mark.parametrize("step", [1, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda output: rows(output, [0, 2]), "returned 0 rows for request {b}"),
        (lambda output: rows(output, [0, 1, 1, 2]), "returned 2 rows for request {b}"),
        (lambda output: rows(output, [0, 2], errors={"ghost": ValueError("boo")}), "returned 0 rows for request {b}"),
        (lambda output: with_tokens(output, []), "returned [] for request {b} in place of one token"),
        (lambda output: with_tokens(output, [5, 6]), "returned [5, 6] for request {b} in place of one token"),
        (lambda output: with_tokens(output, [None]), "returned [None] for request {b} in place of one token"),
        (lambda output: with_tokens(output, [2.5]), "returned [2.5] for request {b} in place of one token"),
        (lambda output: with_tokens(output, [-1]), "returned [-1] for request {b} in place of one token"),
        (lambda output: with_tokens(output, None), "returned None for request {b} in place of one token"),
    ],
    ids=["dropped", "twice", "dropped, an error for a ghost", "empty", "two", "none", "a float", "negative", "no list"],
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
    assert {rid: o.token_ids for rid, o in outputs.items() if rid != victim} == {
        rid: tokens for rid, tokens in expected.items() if rid != victim
    }
    check_drained(engine)


@pytest.mark.parametrize("step", [1, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda output: None, "returned None, which is not a ModelRunnerOutput"),
        (lambda output: replace(output, req_ids=["ghost", *output.req_ids[1:]]), "a row for 'ghost', which is not in"),
        (lambda output: replace(output, req_ids=output.req_ids[:-1]), "2 ids, 3 rows of tokens and 3 of logprobs"),
        (lambda output: replace(output, logprobs=[]), "3 ids, 3 rows of tokens and 0 of logprobs"),
        (lambda output: replace(output, prompt_logprobs=None), "prompt_logprobs that are not a mapping"),
        (lambda output: replace(output, errors=[]), "that are not a mapping"),
    ],
    ids=["nothing", "a stranger", "an id too few", "no logprobs", "no prompt logprobs", "no errors"],
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
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            output = super().execute_model(scheduler_output)
            return rows(output, list(range(len(output.req_ids)))[::-1])

    engine = make_engine({"model_runner": Backwards}, **setting(3))
    submit(engine)
    assert {rid: output.token_ids for rid, output in run(engine).items()} == expected


def test_what_is_sound_passes_as_it_is() -> None:
    row = LogprobRow((5,), (0.0,), (1,))
    output = ModelRunnerOutput(["a", "b"], [[5], [6]], [[row], [None]], errors={"b": ValueError("of its prompt")})
    assert checked(output, {"a": 1, "b": 1}) is output
    assert checked(ModelRunnerOutput([], [], []), {}).req_ids == []
    alone = ModelRunnerOutput(["a"], [[5]], [[None]], errors={"b": ValueError("its row")})
    assert checked(alone, {"a": 1, "b": 1}) is alone


# --- triton -----------------------------------------------------------------------------------------------------------


def test_triton_that_was_imported_before_its_interpreter_was_asked_for_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What triton's own functions are was decided at its import; kernels of the other kind cannot call them."""

    class JITFunction:
        """As a triton that compiles has them."""

    from m3_paged_attention.attention import registry

    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(registry, "version", {"triton": "3.7.1", "numpy": "2.4.6"}.__getitem__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(cdiv=JITFunction()))
    device = ModelConfig(device="cpu").torch_device()
    with pytest.raises(ConfigError, match=r"^attention_backend='triton' cannot run here: triton was imported before"):
        registry.choose("triton", device)
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(cdiv=object()))
    assert registry.choose("triton", device) == "triton"
