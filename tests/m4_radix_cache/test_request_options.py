"""`priority=` and `cache_salt=`: every call that takes a prompt takes them, and refuses wrong ones at once."""

from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request.errors import shown
from m4_radix_cache import InvalidRequestError
from tests.m4_radix_cache.engines import MakeEngine, Recorder, check_drained, greedy, ids, run, setting

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "What is a page?"}]
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda engine, **options: engine.generate(ids(9), greedy(2), **options),
    "chat": lambda engine, **options: engine.chat(MESSAGES, greedy(2), **options),
    "stream": lambda engine, **options: engine.stream(ids(9), greedy(2), **options),
    "add_request": lambda engine, **options: engine.add_request(ids(9), greedy(2), **options),
    "add_request of a family": lambda engine, **options: engine.add_request(ids(9), greedy(2, n=2), **options),
}
ALL_CALLS = CALLS | {
    "generate_batch": lambda engine, **options: engine.generate_batch([ids(9), ids(4)], greedy(2), **options)
}
WRONG = [
    ({"priority": "high"}, "priority='high' is not valid: Expected `int`, got `str`"),
    ({"priority": True}, "priority=True"),
    ({"priority": 2**63}, "priority=9223372036854775808 is not valid: Expected `int` <= 9223372036854775807"),
    ({"priority": 10**5000}, "priority=a number of thousands of digits is not valid"),
    ({"cache_salt": ""}, "cache_salt='' must be valid text of 1 to 4,096 characters"),
    ({"cache_salt": 7}, "cache_salt=7"),
    ({"salt": "tenant"}, "salt= is unknown here: .*takes request_id, priority, cache_salt"),
    ({"priority": 1, "cache_salt": False}, "cache_salt=False"),
]
each_wrong = pytest.mark.parametrize(("options", "message"), WRONG, ids=shown)


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", CALLS)
@each_wrong
def test_a_wrong_option_is_refused_before_anything_changes(
    make_engine: MakeEngine, name: str, options: dict[str, Any], message: str
) -> None:
    engine = make_engine(chat_template=TEMPLATE, **setting(2))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(4), greedy(2), request_id="other", priority=1)
    before, told = engine.stats(), len(recorder.records)
    with pytest.raises(InvalidRequestError, match=message):
        CALLS[name](engine, **options)
    assert engine.stats() == before and len(recorder.records) == told
    assert run(engine)["other"].finish_reason == "length"
    assert engine.add_request(ids(4), greedy(1)) == "req-1", "the refused one took no number"
    run(engine)


@each_wrong
def test_a_batch_with_a_wrong_option_runs_nothing(
    make_engine: MakeEngine, options: dict[str, Any], message: str
) -> None:
    """Names are wrong for the whole call, values for each of its requests (ruling 16)."""
    engine = make_engine(**setting(2))
    if "salt" in options:
        with pytest.raises(InvalidRequestError, match=message):
            ALL_CALLS["generate_batch"](engine, **options)
    else:
        outputs = ALL_CALLS["generate_batch"](engine, **options)
        assert [output.finish_reason for output in outputs.values()] == ["error"] * 2
        assert all(isinstance(output.error, InvalidRequestError) for output in outputs.values())
    assert engine.stats().num_steps == 0
    check_drained(engine)


@pytest.mark.parametrize("name", ALL_CALLS)
def test_every_call_passes_them_on_to_each_request(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(chat_template=TEMPLATE, **setting(2))
    recorder = Recorder(engine.tracer)
    result = ALL_CALLS[name](engine, priority=-(2**63) + 1, cache_salt="tenant")
    assert result is not None, "kept: a stream that nobody holds is aborted"
    run(engine)
    passed = [(event.priority, event.extra_key) for event in recorder.events("request_options")]
    assert passed == [(-(2**63) + 1, "tenant")] * (2 if name.endswith("family") or name == "generate_batch" else 1)
    assert recorder.events("inserted")[0].extra_key == "tenant"
