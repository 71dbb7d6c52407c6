"""Whatever a user hands in, at whichever parameter: it is accepted, or one typed error names at once what was wrong.

The error names the value in a short line, nothing has changed, and a group of engines answers as one engine does.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m1_single_request import EngineError, InvalidRequestError, PromptTooLongError, SamplingParams
from tests.events.milestones import MILESTONES
from tests.support.odd_values import LONGEST_SECONDS, ODD, about, answer_to

REQUIRED = {"num_tokens": (1, 2), "step_ms": (1.0, 2.0)}
"""Of a cost table: fields without a default."""


def configurations(package: str) -> list[type]:
    """The dataclasses that a user fills in, each of them in the first milestone that has it."""
    found: list[type] = []
    for name in MILESTONES[: MILESTONES.index(package) + 1]:
        own = [
            value
            for key, value in vars(importlib.import_module(name)).items()
            if isinstance(value, type) and (key.endswith("Config") or key in ("SamplingParams", "CostTable"))
        ]
        found = [cls for cls in own if cls not in found] if name == package else found + own
    return found


@pytest.mark.parametrize("package", MILESTONES)
def test_every_field_of_every_configuration_takes_or_refuses_any_value(package: str) -> None:
    for cls in configurations(package):
        needed = {f.name: REQUIRED[f.name] for f in dataclasses.fields(cls) if f.name in REQUIRED}
        for field in dataclasses.fields(cls):
            for name, value in ODD.items():
                with about(cls.__name__, field.name, name):
                    answer_to(lambda cls=cls, arguments={**needed, field.name: value}: cls(**arguments))


# --- requests ---------------------------------------------------------------------------------------------------------

SHORT = SamplingParams(max_tokens=1)
QUESTION = [{"role": "user", "content": "Hi"}]


def engine_of(package: str, transport: str | None = None) -> Any:
    """A milestone's engine as it ships, with little memory; a group of them with `transport`."""
    module: Any = importlib.import_module(package)
    settings: dict[str, Any] = {"model_config": module.ModelConfig(device="cpu", dtype="float32")}
    if package >= "m4":
        settings["cache_config"] = module.CacheConfig(max_total_tokens=1024)
    if transport is not None:
        settings["disaggregation_config"] = module.DisaggregationConfig(transport=transport)
    return module.LLMEngine(**settings)


def calls_of(engine: Any) -> dict[str, Callable[[Any], Any]]:
    """Every parameter of the face that takes a value, as a call with it."""

    def ask(prompt: Any = "Hi", params: Any = None, **options: Any) -> None:
        """Queue a request and give it up: what can be wrong with it is found before."""
        assert engine.abort_request(engine.add_request(prompt, params, **options))

    def drawn(name: str) -> Callable[[Any], None]:
        return lambda value: ask(params=SamplingParams(**{"max_tokens": 2, name: value}))

    def refused(value: Any) -> None:
        """`generate_batch` answers for each prompt; this raises the first one's error."""
        for output in engine.generate_batch(value, SHORT).values():
            if output.error is not None:
                raise output.error

    def exchanged(value: Any) -> None:
        """After all engines have heard of all ends: a flush waits for that."""
        settle(engine)
        engine.update_weights(value)

    calls: dict[str, Callable[[Any], Any]] = {
        "prompt": ask,
        "params": lambda value: ask(params=value),
        "request_id": lambda value: ask(request_id=value),
        "messages": engine.chat_prompt,
        "message": lambda value: engine.chat_prompt([value]),
        "role": lambda value: engine.chat_prompt([{"role": value, "content": "Hi"}]),
        "content": lambda value: engine.chat_prompt([{"role": "user", "content": value}]),
        "part": lambda value: engine.chat_prompt([{"role": "user", "content": [value]}]),
        "text part": lambda value: engine.chat_prompt([{"role": "user", "content": [{"type": "text", "text": value}]}]),
        "image": lambda value: engine.chat_prompt([{"role": "user", "content": [{"type": "image", "image": value}]}]),
        "video": lambda value: engine.chat_prompt([{"role": "user", "content": [{"type": "video", "video": value}]}]),
        "chat_template_kwargs": lambda value: engine.chat_prompt(QUESTION, chat_template_kwargs=value),
        "prompts": lambda value: engine.generate_batch(value if is_short(value) else range(10**9), SHORT),
        "a prompt of several": lambda value: refused([value]),
        "params of several": lambda value: engine.generate_batch([""], value),
        "progress": lambda value: engine.generate_batch([], progress=value),
        "abort": engine.abort_request,
        "reader": engine.tracer.detach,
        **({"update_weights": exchanged} if hasattr(engine, "update_weights") else {}),
        **{f.name: drawn(f.name) for f in dataclasses.fields(SamplingParams)},
        **{
            name: (lambda value, name=name: ask(**{name: value}))  # type: ignore[misc]
            for name in ("priority", "cache_salt", "speculate")
        },
    }
    return calls


def settle(engine: Any) -> None:
    """Step until nothing is left, here and on the engines of a group."""
    while engine.has_unfinished_requests():
        engine.step()
    assert not hasattr(engine, "flush_cache") or engine.flush_cache()


def is_short(value: Any) -> bool:
    """Whether a batch of these prompts is done in no time."""
    return not hasattr(value, "__len__") or getattr(value, "shape", None) is not None or len(value) < 1000


def answers_of(engine: Any) -> dict[tuple[str, str], str]:
    """The answer of an engine to every odd value at every parameter."""
    answers = {}
    for parameter, call in calls_of(engine).items():
        for name, value in ODD.items():
            with about(parameter, name):
                answer = answer_to(lambda call=call, value=value: call(value))
                answers[parameter, name] = re.sub(r" \(on \w+-\d+\)$", "", answer)  # where a group saw it
    settle(engine)
    assert engine.generate("Hi", SHORT).finish_reason in ("stop", "length"), "it still works"
    return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", MILESTONES)
def test_every_parameter_of_every_call_takes_or_refuses_any_value(package: str) -> None:
    with engine_of(package) as engine:
        answers_of(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_a_group_answers_to_every_value_as_one_engine_does(transport: str) -> None:
    with engine_of("m6_multimodal_pd") as engine:
        alone = answers_of(engine)
    with engine_of("m6_multimodal_pd", transport) as group:
        assert answers_of(group) == alone


@pytest.fixture(scope="module", params=[None, "in_process"], ids=["one engine", "a group"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """m6 alone, and as a group."""
    with engine_of("m6_multimodal_pd", request.param) as made:
        yield made


NAMES = {"half a pair": "a\ud800", "no text": 7, "empty": "", "long": "x" * 5000, "an array": np.array(["a", "b"])}


@pytest.mark.parametrize("parameter", ["request_id", "cache_salt"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_message_holds_is_refused_at_once(engine: Any, parameter: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{parameter}=") as refused:
        engine.add_request("Hi", **{parameter: NAMES[name]})
    assert len(str(refused.value)) < 200
    assert not engine.has_unfinished_requests()


PLACES: dict[str, Any] = {**NAMES, "a NUL": "a\0b", "nothing": None, "an object": object(), "a list": ["a"]}


@pytest.mark.parametrize("operation", ["start_profile", "update_weights"])
@pytest.mark.parametrize("place", PLACES)
def test_an_operation_takes_a_path_and_nothing_else(
    engine: Any, operation: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError) as refused:
        getattr(engine, operation)(PLACES[place])
    assert str(refused.value).startswith(("folder=", "model=")) and len(str(refused.value)) < 300
    assert not list(tmp_path.iterdir()), "no folder was made of it"
    assert engine.generate("Hi", SHORT).error is None


def test_a_chat_of_ten_megabytes_is_refused_by_its_length(engine: Any) -> None:
    chat = [{"role": "user", "content": "What is a KV cache? " * 500_000}]
    answer = answer_to(lambda: engine.chat_prompt(chat))
    assert answer.startswith(PromptTooLongError.__name__) and "10,000,0" in answer
    assert answer == answer_to(lambda: engine.chat(chat)), f"each within {LONGEST_SECONDS} s"
