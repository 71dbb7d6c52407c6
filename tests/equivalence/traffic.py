"""Traffic that Hypothesis makes, an engine that serves it, and m1 that answers each request alone.

A milestone brings what is its own: which lengths, settings and numbers of outputs it is asked for, within which limits,
and what must hold of it after every step. The comparison is the one of `harness.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from m1_single_request import SamplingParams
from tests.equivalence.draws import MeasuringSampler, gaps_of
from tests.equivalence.harness import Reference, check_answer

EOS = range(0, 4096, 40)  # so many that answers of a random model end anywhere
MOST_TOKENS = 12
MOST_STEPS = 800
SEED = 70
BRANCH_TOKENS = 7

CLEAR_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, on past eos": {"ignore_eos": True},
    "greedy with a stop string": {"stop": "e"},
    "greedy with penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "greedy with a bias": {"logit_bias": {7: 4.0, 11: -100.0}, "min_tokens": 3},
    "drawn": {"temperature": 1.0, "seed": SEED, "top_k": 5},
    "drawn with everything": {
        "temperature": 0.8,
        "seed": SEED,
        "top_k": 4,
        "top_p": 0.97,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_tokens": 4,
    },
}
"""Settings with so few tokens to choose from that nearly all choices are clear."""
WIDE_SETTINGS: dict[str, dict[str, Any]] = {
    "drawn from all tokens": {"temperature": 1.0, "seed": SEED},
    "drawn from all tokens with penalties": {"temperature": 0.8, "seed": SEED, "repetition_penalty": 1.2},
}
"""Settings with so many that an answer of some length is cut at a choice that is not clear."""
RATED_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy with log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
}
"""Settings with log-probabilities, for engines whose outputs are compared in all fields."""
SETTINGS = CLEAR_SETTINGS | WIDE_SETTINGS


def prompt_of(length: int, which: int = 0) -> list[int]:
    """One of the prompts of this length."""
    rng = Random(f"{length}/{which}")
    return [rng.randrange(4096) for _ in range(length)]


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A request, the step before which it comes, and how many steps later it is given up, if it is."""

    prompt_len: int
    which: int
    setting: str
    n: int
    max_tokens: int
    arrival: int
    patience: int | None

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.prompt_len, self.which)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of its request, for engines that have them."""
        return {}

    @property
    def params(self) -> SamplingParams:
        values = (SETTINGS | RATED_SETTINGS)[self.setting]
        least = {"min_tokens": min(values.get("min_tokens", 0), self.max_tokens)}
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, **values | least)


WHICH = st.integers(0, 1)


def asks_of(
    prompt_lens: Sequence[int],
    settings: Iterable[str],
    *,
    n: SearchStrategy[int],
    arrival: SearchStrategy[int],
    patience: SearchStrategy[int | None],
    kind: type[Ask] = Ask,
    which: SearchStrategy[int] = WHICH,
    **options: SearchStrategy[Any],
) -> SearchStrategy[Any]:
    """Requests of these lengths and settings; `options`: the fields that only this kind has."""
    return st.builds(
        kind,
        prompt_len=st.sampled_from(prompt_lens),
        which=which,
        setting=st.sampled_from(sorted(settings)),
        n=n,
        max_tokens=st.integers(1, MOST_TOKENS),
        arrival=arrival,
        patience=patience,
        **options,
    )


@dataclass(frozen=True)
class SharingAsk(Ask):
    """A request whose prompt begins as others do: with a path in a small tree of texts, which may end anywhere."""

    priority: int
    cache_salt: str | None
    before: tuple[int, ...] = ()
    """The earlier tokens of its conversation; the path comes behind them."""

    @property
    def prompt(self) -> list[int]:
        return [*self.before, *tree_prompt(self.prompt_len, self.which)]

    @property
    def options(self) -> Mapping[str, Any]:
        return {"priority": self.priority, "cache_salt": self.cache_salt}


def tree_prompt(length: int, path: int) -> list[int]:
    """The first `length` tokens on one of the paths of a tree: it forks at every seventh token, by the bits of
    `path`, lowest first.
    """
    runs = -(-length // BRANCH_TOKENS)
    tokens = [token for n in range(runs) for token in prompt_of(BRANCH_TOKENS, n * 1000 + path % 2 ** (n + 1))]
    return tokens[:length]


# --- m1, alone --------------------------------------------------------------------------------------------------------


class Alone:
    """`alone(ask, child)`: m1's answer to one child of a request, as a reference, and how it ended."""

    def __init__(self, make_m1: Callable[..., Any]) -> None:
        self.sampler = MeasuringSampler()
        self.engine = make_m1({"sampler": lambda: self.sampler}, eos_token_ids=EOS)
        self.answers: dict[Any, tuple[Reference, str]] = {}

    def __call__(self, ask: Ask, child: int) -> tuple[Reference, str]:
        child = child if "seed" in SETTINGS[ask.setting] else 0
        key = tuple(ask.prompt), ask.setting, child
        if key not in self.answers:
            self.answers[key] = self._answer(ask, child)
        whole, reason = self.answers[key]
        return cut_to(whole, ask.max_tokens), reason if len(whole.token_ids) <= ask.max_tokens else "length"

    def _answer(self, ask: Ask, child: int) -> tuple[Reference, str]:
        """As long as any request may want it: a shorter one is its beginning."""
        values = dict(SETTINGS[ask.setting])
        if "seed" in values:
            values["seed"] += child
        self.sampler.margins.clear()
        output = self.engine.generate(ask.prompt, SamplingParams(max_tokens=MOST_TOKENS, **values))
        gaps = gaps_of(self.sampler.margins)
        return Reference(tuple(ask.prompt), output.token_ids, gaps), output.finish_reason


def cut_to(reference: Reference, size: int) -> Reference:
    """The first `size` tokens of it."""
    return Reference(reference.prompt_token_ids, reference.token_ids[:size], reference.gaps[:size])


# --- the comparison ---------------------------------------------------------------------------------------------------


def serve(engine: Any, asks: Sequence[Ask], check_step: Callable[[Any], None]) -> list[Any]:
    """Let the requests come and go, with a look at the engine after each step; the last output of each.

    No output shrinks or changes, and none comes after its end.
    """
    last: dict[str, Any] = {}
    number = 0
    while number <= max(ask.arrival for ask in asks) or engine.has_unfinished_requests():
        assert number < MOST_STEPS, "the engine does not come to an end"
        for index, ask in enumerate(asks):
            if ask.arrival == number:
                engine.add_request(ask.prompt, ask.params, request_id=f"r{index}", **ask.options)
            if ask.patience is not None and ask.arrival + ask.patience == number:
                engine.abort_request(f"r{index}")
        outputs = engine.step()
        check_step(engine)
        for rid in outputs.keys() & last.keys():
            assert not last[rid].finished, "reported again after its end"
            for old, new in zip(last[rid].outputs, outputs[rid].outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
        last |= outputs
        number += 1
    return [last[f"r{index}"] for index in range(len(asks))]


def never(ask: Ask, error: Any, num_tokens: int) -> bool:
    """No request may end in an error."""
    return False


def check_ask(
    ask: Ask, output: Any, alone: Alone, may_fail: Callable[[Ask, Any, int], bool] = never
) -> list[Reference]:
    """Hold all outputs of a request to m1's; returns what they were held to.

    `may_fail(ask, error, num_tokens)`: whether it may end in this error after so many tokens.
    """
    references = []
    assert len(output.outputs) == ask.n and output.finished, f"{ask}: {output}"
    for child, completion in enumerate(output.outputs):
        name = f"{ask}, child {child}"
        reference, reason = alone(ask, child)
        num_tokens = len(completion.token_ids)
        if completion.finish_reason == "abort":
            assert ask.patience is not None, f"{name} was not given up"
            reference = cut_to(reference, num_tokens)
        elif completion.finish_reason == "error":
            assert may_fail(ask, output.error, num_tokens), f"{name} failed: {output.error}"
            reference = cut_to(reference, num_tokens)
        elif reference.cut is None:
            assert completion.finish_reason == reason, f"{name} ends with {completion.finish_reason}, not {reason}"
        check_answer(reference, completion.token_ids, name)
        references.append(reference)
    return references
