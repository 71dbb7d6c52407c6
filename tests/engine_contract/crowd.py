"""A few requests that share an engine, their answers, and what must hold on the way."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from m1_single_request import SamplingParams
from tests.engine_contract.variants import Variant
from tests.support.engines import drain, greedy, ids as ids

Answers = dict[str, tuple[int, ...]]
MakeEngine = Callable[..., Any]
"""`make_engine(parts, seats=..., budget=..., room=..., ...)`: an engine of the variant on the tiny model."""

PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51], "d": [61, 62], "e": [71, 72, 73, 74]}
NUM_TOKENS = {"a": 6, "b": 3, "c": 5, "d": 6, "e": 4}
"""With seats for three, d joins when b has ended, and e when c has."""
SEATS = 3


def answers_of(make_m1: Any) -> Answers:
    """The answers to the crowd if nothing breaks."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(NUM_TOKENS[rid])).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: Any, **params: SamplingParams) -> None:
    """Let the crowd come; `params` are those of one that is not greedy."""
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, params.get(rid, greedy(NUM_TOKENS[rid])), request_id=rid)


def calls_of(engine: Any) -> list[Callable[[], Any]]:
    """Every call that makes a request or a step."""
    return [
        lambda: engine.generate("a", greedy(1)),
        lambda: engine.stream("a", greedy(1)),
        lambda: engine.add_request("a", greedy(1)),
        lambda: engine.generate_batch(["a"], greedy(1)),
        lambda: engine.step(),
    ]


def run(variant: Variant, engine: Any) -> dict[str, Any]:
    """Step until nothing is left, looking at the engine after every step; the last output of every request."""
    last = drain(engine, variant.check_step)
    variant.check_drained(engine)
    return last


def note(last: dict[str, Any], outputs: Mapping[str, Any]) -> None:
    """Keep the last output of every request. A request that has ended is not reported again."""
    assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported again after its end"
    last |= outputs


def ends(outputs: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Why each request ended, and with how many tokens."""
    return {rid: (output.finish_reason, len(output.token_ids)) for rid, output in sorted(outputs.items())}


def check_the_rest(
    variant: Variant,
    engine: Any,
    last: Mapping[str, Any],
    expected: Answers,
    failed: Mapping[str, int],
    error: BaseException | type | None = None,
) -> None:
    """Requests that `failed` have so many tokens, the others all of theirs, and a request that comes now as well."""
    for rid, output in last.items():
        if rid in failed:
            assert (output.finish_reason, output.finished) == ("error", True), rid
            assert output.token_ids == expected[rid][: failed[rid]], rid
            if error is not None:
                assert output.error is error or isinstance(output.error, error if isinstance(error, type) else ())
        else:
            assert (output.finish_reason, output.error) == ("length", None), rid
            assert output.token_ids == expected[rid], rid
    assert last.keys() == PROMPTS.keys() and failed.keys() <= last.keys()
    assert engine.stats().num_finished == Counter(output.finish_reason for output in last.values())
    for rid in "ade":
        assert engine.generate(PROMPTS[rid], greedy(NUM_TOKENS[rid])).token_ids == expected[rid], f"{rid}, again"
    variant.check_drained(engine)
