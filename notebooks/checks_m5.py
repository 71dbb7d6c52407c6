"""What the notebook of m5 leans on: the graders of its labs and exercises. Everything else comes from `checks.py`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from m4_radix_cache.mem_cache.radix_key import RadixKey
from m5_chunked_prefill_spec import PARTS, CacheConfig, LLMEngine, SamplingParams, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.request import Req
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.proposer import NgramProposer
from m5_chunked_prefill_spec.speculative.speculation import Speculation

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, ids_of, short, show_source, tokens_alone
except ModuleNotFoundError:  # beside the notebook
    from checks import (  # type: ignore[no-redef]
        Mismatch,
        check,
        grader,
        ids_of,
        short,
        show_source,
        tokens_alone,
    )

__all__ = [
    "ONE_MODEL",
    "always",
    "check",
    "ids_of",
    "new_engine",
    "scheduler_with",
    "show_source",
    "speculation_with",
]

ONE_MODEL: dict[str, Any] = {"model_loader": functools.cache(PARTS["model_loader"])}
"""Loads each checkpoint once, however many engines are built."""
ROOM = 16 * 1024


def new_engine(*, parts: Mapping[str, Any] | None = None, **configs: Any) -> LLMEngine:
    """An engine that shares its weights with all others made here, with KV memory for `ROOM` tokens or as told."""
    memory = {"cache_config": CacheConfig(max_total_tokens=ROOM)}
    return LLMEngine(parts=ONE_MODEL | dict(parts or {}), **(memory | configs))


def scheduler_with(batch_class: type[ScheduleBatch]) -> type[Scheduler]:
    """The engine's scheduler, with batches of another kind."""
    return type("Scheduler", (Scheduler,), {"batch_class": batch_class})


def speculation_with(policy: Callable[..., Any], step_ms: Callable[[int], float], draft_ms: float) -> type[Speculation]:
    """The engine's speculation, with a policy for each request that lowers the number of its drafts."""

    class BacksOff(Speculation):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.policies: dict[str, Any] = {}

        def limit(self, req: Req) -> int:
            return self.policies.setdefault(req.rid, policy(step_ms, draft_ms)).how_many(super().limit(req))

        def verified(self, req: Any, drafted: int, accepted: int) -> None:
            super().verified(req, drafted, accepted)
            self.policies[req.rid].verified(drafted, accepted)

    return BacksOff


def always(token_id: int) -> Any:
    """A proposer that guesses the same token each time, and one token only."""

    class Always:
        def __init__(self, config: Any = None) -> None:
            pass

        def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
            return [[token_id] * min(limit, 1) for limit in limits]

    return Always


# --- exercises: a step's budget ---------------------------------------------------------------------------------------

Filled = list[tuple[str, int]]
STEPS: tuple[tuple[int, Sequence[tuple[str, int]], int, str], ...] = (
    (0, [("a", 30)], 64, "A prompt that fits is taken whole."),
    (0, [("a", 100)], 64, "What does not fit is cut, to the last token of the budget."),
    (4, [("a", 100)], 64, "Everybody who decodes has a token of the budget already."),
    (4, [("a", 10), ("b", 20), ("c", 100)], 64, "Prompts in their order, and the first that does not fit is cut."),
    (4, [("a", 60), ("b", 5)], 64, "Nothing is left for 'b': nobody gets a piece of no tokens."),
    (4, [("a", 100), ("b", 5)], 64, "No prompt comes after one that was cut: 'a' continues first in the next step."),
    (64, [("a", 5)], 64, "Everything is spent."),
    (3, [], 64, "No prompt waits."),
)


@grader("m5.fill")
def grade_fill(fill: Callable[[int, list[tuple[str, int]], int], Filled]) -> str:
    """`fill(num_decodes, prompts, budget)`: the pieces of prompts that go into a step beside the decodes."""
    for num_decodes, prompts, budget, hint in STEPS:
        _compare_fill(fill, num_decodes, prompts, budget, hint)
    rng = Random(0)
    for _ in range(200):
        prompts = [(name, rng.randrange(1, 90)) for name in "abcde"[: rng.randrange(6)]]
        budget = rng.randrange(1, 129)
        _compare_fill(fill, rng.randrange(budget + 1), prompts, budget, "")
    for first, wanted in ((100, [32, 32, 32, 4]), (64, [32, 32])):
        got, rest = [], first
        while rest > 0 and len(got) < 10:
            [(_, given)] = fill(0, [("a", rest)], 32)
            got, rest = [*got, given], rest - given
        if got != wanted:
            raise Mismatch(f"A prompt of {first} tokens alone, 32 a step, runs as {wanted}, with you as {got}.")
    decodes, steps = _engine_steps()
    for (lacking, wanted), budget in zip(steps, [24] * len(steps), strict=True):
        _compare_fill(fill, decodes, lacking, budget, "So the engine itself fills a step.", wanted)
    return "By hand, 200 times at random, and as the engine fills its steps: to the last token, one piece at most."


def _compare_fill(
    fill: Any,
    num_decodes: int,
    prompts: Sequence[tuple[str, int]],
    budget: int,
    hint: str,
    wanted: Filled | None = None,
) -> None:
    if wanted is None:
        wanted = []
        left = budget - num_decodes
        for name, lacking in prompts:
            if left:
                wanted.append((name, min(lacking, left)))
                left -= min(lacking, left)
    got = fill(num_decodes, list(prompts), budget)
    if not isinstance(got, list) or [tuple(each) for each in got] != wanted:
        raise Mismatch(
            f"{num_decodes} decodes, {short(list(prompts))} wait, {budget} tokens a step: {wanted} is right, you say "
            f"{short(got)}.{' ' if hint else ''}{hint}"
        )


class _Batches:
    """A trace reader that keeps what the steps were filled with."""

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    def read(self, record: Any) -> None:
        """Keep a batch."""
        if isinstance(record.event, Batch):
            self.seen.append(record.event)

    def close(self) -> None:
        """Nothing to release."""


@functools.cache
def _engine_steps() -> tuple[int, list[tuple[list[tuple[str, int]], Filled]]]:
    """Two streams, then prompts of 30, 10 and 40 tokens, 24 tokens a step: what was lacking, and what was given."""
    lacking = {"a": 30, "b": 10, "c": 40}
    found = []
    with new_engine(
        scheduler_config=SchedulerConfig(max_num_batched_tokens=24, schedule_policy="fcfs"),
        cache_config=CacheConfig(prefix_cache="chunk", max_total_tokens=ROOM),
    ) as engine:
        batches = _Batches()
        for name in ("x", "y"):
            engine.add_request(ids_of(4), SamplingParams(max_tokens=40, ignore_eos=True), request_id=name)
        engine.step()
        engine.tracer.attach(batches)
        for name, length in lacking.items():
            engine.add_request(ids_of(length), SamplingParams(max_tokens=1, ignore_eos=True), request_id=name)
        while any(lacking.values()):
            before = [(name, number) for name, number in lacking.items() if number]
            engine.step()
            event = batches.seen[-1]
            given = dict(zip(event.rids[: event.num_prompts], event.extend_lens, strict=False))
            found.append((before, list(given.items())))
            lacking = {name: number - given.get(name, 0) for name, number in lacking.items()}
    return 2, found


# --- exercises: guesses -----------------------------------------------------------------------------------------------

TEXTS: tuple[tuple[list[int], int, str], ...] = (
    ([1, 2, 3, 4, 9, 1, 2], 2, "1 2 stood at the beginning: 3 4 followed there."),
    ([1, 2, 3, 4, 9, 1, 2], 8, "No more than there are; what follows may reach into the end itself."),
    ([1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, "Of two places with equally long runs the earliest counts."),
    ([5, 1, 2, 3, 9, 7, 1, 2, 4, 9, 7, 1, 2], 1, "A longer run of last tokens decides before a shorter one."),
    ([8, 1, 2, 9, 1], 3, "A single token is less than `least`: too little to go by."),
    ([1, 2, 3, 4], 3, "Nothing stood there before."),
    ([7, 7, 7, 7], 3, "A run may overlap with the end, but it is not the end itself."),
    ([1, 2], 3, "There is nothing before the end."),
    ([], 3, "Of nothing nothing can be guessed."),
)


@grader("m5.lookup")
def grade_lookup(lookup: Callable[[list[int], int, int, int], list[int]]) -> str:
    """`lookup(tokens, limit, longest, least)`: up to `limit` tokens that followed the last ones where they stood."""
    for tokens, limit, hint in TEXTS:
        _compare_lookup(lookup, tokens, limit, 4, 2, hint)
    rng = Random(0)
    for _ in range(500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(30))]
        least = rng.randint(1, 3)
        _compare_lookup(lookup, tokens, rng.randint(1, 6), rng.randint(least, 5), least, "")
    return "By hand and in 500 random texts: your guesses are those of NgramProposer."


def _compare_lookup(lookup: Any, tokens: list[int], limit: int, longest: int, least: int, hint: str) -> None:
    proposer = NgramProposer(prompt_lookup_min=least, prompt_lookup_max=longest)
    wanted = proposer.lookup(RadixKey(tokens), limit)
    given = list(tokens)
    got = lookup(given, limit, longest, least)
    if given != tokens:
        raise Mismatch("lookup() changes the tokens. They are the request's.")
    if not isinstance(got, Sequence) or list(got) != wanted:
        raise Mismatch(
            f"After {tokens}, runs of {longest} to {least} tokens, at most {limit}: {wanted} is right, you say "
            f"{short(got)}.{' ' if hint else ''}{hint}"
        )


# --- exercises: accept ------------------------------------------------------------------------------------------------

CERTAIN: tuple[tuple[list[int], list[int], list[int], str], ...] = (
    ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], "All are right, and the row behind the last guess gives one token more."),
    ([5, 6, 7], [5, 9, 7, 8], [5, 9], "Behind a wrong guess nothing counts: those rows were computed on a wrong text."),
    (
        [5, 6, 7],
        [4, 6, 7, 8],
        [4],
        "In the place of a wrong guess stands the model's own token: a step never brings none.",
    ),
    ([], [3], [3], "Without guesses it is a plain decode."),
)
DRAWN: tuple[tuple[list[int], list[int], list[float], list[float], list[float], list[int], str], ...] = (
    (
        [5],
        [1, 8],
        [0.9],
        [0.3],
        [0.99],
        [5, 8],
        "What the model likes at least as much as the draft does is always kept.",
    ),
    ([5], [1, 8], [0.2], [0.4], [0.4], [5, 8], "Kept with probability p / q = 0.5, and 0.4 is below it."),
    ([5], [1, 8], [0.2], [0.4], [0.6], [1], "Kept with probability p / q = 0.5, and 0.6 is not below it."),
    ([5], [1, 8], [0.0], [0.4], [0.0], [1], "What the model would never say is never kept, not for u = 0 either."),
    ([5, 6], [1, 2, 8], [0.5, 0.1], [0.5, 0.9], [0.7, 0.5], [5, 2], "The second is rejected, and replaced."),
)


@grader("m5.accept")
def grade_accept(accept: Callable[..., list[int]]) -> str:
    """`accept(guesses, own, p=None, q=None, u=None)`: the tokens that a verification brings."""
    for guesses, own, wanted, hint in CERTAIN:
        _compare_accept(accept, (guesses, own), wanted, hint)
    for guesses, own, p, q, u, wanted, hint in DRAWN:
        _compare_accept(accept, (guesses, own, p, q, u), wanted, hint)
    rng = Random(0)
    for _ in range(300):
        guesses = [rng.randrange(3) for _ in range(rng.randrange(5))]
        own = [rng.randrange(3) for _ in range(len(guesses) + 1)]
        p, q, u = ([rng.choice((0.0, 0.1, 0.25, 0.5, 1.0)) for _ in guesses] for _ in range(3))
        q = [value or 0.5 for value in q]
        u = [value * 0.99 for value in u]
        _compare_accept(accept, (guesses, own), _certain(guesses, own), "")
        _compare_accept(accept, (guesses, own, p, q, u), _drawn(guesses, own, p, q, u), "")
    distance = _distance(accept)
    if distance > 0.02:
        raise Mismatch(
            f"20,000 guesses were drawn from one distribution, and what you keep or replace is {distance:.3f} away "
            f"from the other one (total variation). It should be below 0.02."
        )
    return (
        f"By hand, 600 times at random, and 20,000 times drawn: the tokens are distributed as by the model "
        f"(total variation {distance:.3f})."
    )


def _certain(guesses: Sequence[int], own: Sequence[int]) -> list[int]:
    right = next((i for i, (guess, said) in enumerate(zip(guesses, own, strict=False)) if guess != said), len(guesses))
    return [*guesses[:right], own[right]]


def _drawn(
    guesses: Sequence[int], own: Sequence[int], p: Sequence[float], q: Sequence[float], u: Sequence[float]
) -> list[int]:
    kept = [number * likely < real for number, likely, real in zip(u, q, p, strict=True)]
    right = kept.index(False) if False in kept else len(kept)
    return [*guesses[:right], own[right]]


def _compare_accept(accept: Any, given: tuple[Any, ...], wanted: list[int], hint: str) -> None:
    got = accept(*(list(each) for each in given))
    if not isinstance(got, Sequence) or list(got) != wanted:
        names = ("guesses", "own", "p", "q", "u")
        told = ", ".join(f"{name}={short(list(each))}" for name, each in zip(names, given, strict=False))
        raise Mismatch(f"accept({told}) brings {wanted}, yours {short(got)}.{' ' if hint else ''}{hint}")


def _distance(accept: Any, num_draws: int = 20_000) -> float:
    """Total variation between the first tokens that come of drawn guesses and the model's distribution."""
    p, q = [0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1]
    surplus = [max(real - likely, 0.0) for real, likely in zip(p, q, strict=True)]
    rng, counts = Random(0), [0] * len(p)
    tokens = range(len(p))
    guesses = rng.choices(tokens, q, k=num_draws)
    others = rng.choices(tokens, surplus, k=num_draws)
    for guess, other in zip(guesses, others, strict=True):
        counts[accept([guess], [other, 0], [p[guess]], [q[guess]], [rng.random()])[0]] += 1
    return sum(abs(count / num_draws - real) for count, real in zip(counts, p, strict=True)) / 2


# --- exercises: back-off ----------------------------------------------------------------------------------------------

MOST, TAIL = 4, 300
Costs = tuple[float, float, float]
"""Milliseconds of a step of one token, of each further token in it, and of making a draft."""
Phases = Sequence[tuple[int, float]]
"""Numbers of tokens, and the rate at which the next draft is right if all before it were."""
BACK_OFFS: tuple[tuple[Costs, Phases, str], ...] = (
    ((1.0, 0.0, 0.0), [(600, 0.8)], "To verify costs nothing here: ask for all of them."),
    ((1.0, 1.0, 0.0), [(600, 0.8)], "A token costs as much as a step here: many drafts are right, and none pays."),
    ((1.0, 0.5, 0.0), [(600, 0.0)], "No draft is right here. Ask for none, and seldom for one to see whether it is."),
    ((1.0, 0.1, 0.9), [(600, 0.5)], "Making a draft costs `draft_ms`, too."),
    (
        (1.0, 0.3, 0.0),
        [(600, 0.0), (1500, 0.95)],
        "The text gets better: ask for a draft now and then, or you never see it.",
    ),
    ((1.0, 0.5, 0.0), [(3000, 0.95), (600, 0.0)], "The text gets worse: old counts must count less."),
)


@grader("m5.back_off")
def grade_back_off(policy: Callable[..., Any]) -> str:
    """`policy(step_ms, draft_ms)`: `how_many(most)` drafts are made, and reported to `verified(drafted, accepted)`."""
    for (first, further, draft_ms), phases, hint in BACK_OFFS:
        own = policy(lambda n, first=first, further=further: first + further * (n - 1), draft_ms)
        got, rate = _ms_per_token(own, (first, further, draft_ms), phases), phases[-1][1]
        fixed = [_fixed_ms(k, (first, further, draft_ms), rate) for k in range(MOST + 1)]
        if got > 1.25 * min(fixed):
            raise Mismatch(
                f"Steps of 1 and 2 tokens take {first} and {first + further} ms, a draft {draft_ms} ms; rates of right "
                f"drafts: {', then '.join(f'{r} for {n} tokens' for n, r in phases)}. At the end your tokens take "
                f"{got:.2f} ms each, those of a fixed number, {fixed.index(min(fixed))}, {min(fixed):.2f} ms. {hint}"
            )
    always_wrong = {"proposer": always(0), "speculation": speculation_with(policy, lambda n: float(n), 0.0)}
    said, drafted = zip(*(_wrong_drafts(parts) for parts in (always_wrong, {"proposer": always(0)})), strict=True)
    if said[0] != said[1] or 2 * drafted[0] > drafted[1]:
        raise Mismatch(
            f"In an engine whose drafts are all wrong you ask for {drafted[0]}; a fixed number makes {drafted[1]}."
        )
    return (
        f"On {len(BACK_OFFS)} texts your tokens cost at most a quarter more than with the best fixed number; in an "
        f"engine with wrong drafts you ask for {drafted[0]} of them instead of {drafted[1]}."
    )


def _ms_per_token(policy: Any, costs: Costs, phases: Phases) -> float:
    """Milliseconds per token of the last `TAIL` tokens of a simulated text."""
    (first, further, draft_ms), rng = costs, Random(0)
    laps: list[float] = []  # by token
    for num_tokens, rate in phases:
        end = len(laps) + num_tokens
        while len(laps) < end:
            k = policy.how_many(MOST)
            if k not in range(MOST + 1):
                raise Mismatch(f"how_many({MOST}) must be a number from 0 to {MOST}, you say {short(k)}.")
            right = next((i for i in range(k) if rng.random() >= rate), k)
            if k:
                policy.verified(k, right)
            laps += [(first + k * (further + draft_ms)) / (1 + right)] * (1 + right)
    return sum(laps[-TAIL:]) / TAIL


def _fixed_ms(k: int, costs: Costs, rate: float) -> float:
    first, further, draft_ms = costs
    return (first + k * (further + draft_ms)) / sum(rate**i for i in range(k + 1))


def _wrong_drafts(parts: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and the number of drafts that were made for it."""
    with new_engine(speculative_config=SpeculativeConfig(method="ngram"), parts=parts) as engine:
        output = engine.generate(ids_of(20), SamplingParams(max_tokens=40, ignore_eos=True))
        return output.token_ids, engine.stats().num_draft_tokens


# --- the labs ---------------------------------------------------------------------------------------------------------

FACTS = (
    "The code of goat is 6706. The code of lamp is 1234. The code of ship is 4821. The code of river is 9999. What is "
    "the code of lamp?"
)
BUDGETS = (16, 24, 32, 48, 256)
LAST_PIECE = " A prompt gives one token, after its last piece, and none before."


@grader("m5.sampled_piece")
def grade_sampled_piece(batch_class: type[ScheduleBatch]) -> str:
    """The lab's batch, repaired: a piece of a prompt gives no token, its last piece one, and decodes one each."""
    wanted = None
    for budget in reversed(BUDGETS):
        with _engine_of(batch_class, max_num_batched_tokens=budget, page_size=4) as engine:
            prompt = engine.chat_prompt([{"role": "user", "content": FACTS}])
            said = _all_tokens(engine, {"long": prompt}, f"{budget} tokens a step", hint=LAST_PIECE)["long"]
            wanted = wanted or said
            if said != wanted:
                raise Mismatch(
                    f"With {budget} tokens a step the answer has the tokens {short(list(said))}, and not "
                    f"{short(list(wanted))}: it must not depend on where the prompt is cut."
                )
    alone = tokens_alone((5, 9, 70), num=4)
    with _engine_of(batch_class, max_num_batched_tokens=16, page_size=4) as engine:
        prompts = {str(length): ids_of(length) for length in alone}
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        said = _all_tokens(engine, prompts, "Three prompts together", params, LAST_PIECE)
        for length, tokens in alone.items():
            if said[str(length)] != tokens:
                raise Mismatch(f"Beside others the prompt of {length} tokens gets {said[str(length)]}, alone {tokens}.")
    with _engine_of(
        batch_class, max_num_batched_tokens=16, page_size=4, parts={"proposer": PARTS["proposer"]}
    ) as engine:
        repeat, tokens = _repeated()
        hint = " A request with guesses needs a row of logits for each of them, and one more."
        said = _all_tokens(engine, {"repeat": repeat, "long": prompt}, "Guesses beside pieces", hint=hint)
        if said != {"repeat": tokens, "long": wanted}:
            raise Mismatch(f"With guesses in the step the answers are others.{hint}")
    return (
        "A prompt whole and in pieces of four sizes, three prompts together, and beside guesses: the same tokens each "
        "time."
    )


@functools.cache
def _repeated() -> tuple[list[int], tuple[int, ...]]:
    """A text that is to be said again, and what is said."""
    with new_engine() as engine:
        prompt = engine.chat_prompt(
            [{"role": "user", "content": "Repeat this text:\nsee a green lamp and a green bird"}]
        )
        return prompt, engine.generate(prompt, SamplingParams(max_tokens=20)).token_ids


def _engine_of(batch_class: type[ScheduleBatch], *, page_size: int, parts: Any = None, **limits: Any) -> LLMEngine:
    guesses = SpeculativeConfig(method="ngram") if parts else SpeculativeConfig()
    return new_engine(
        scheduler_config=SchedulerConfig(**limits),
        cache_config=CacheConfig(page_size=page_size, max_total_tokens=2048, debug=True),
        speculative_config=guesses,
        parts={"scheduler": scheduler_with(batch_class)} | (parts or {}),
    )


def _all_tokens(
    engine: LLMEngine, prompts: Mapping[str, list[int]], what: str, params: SamplingParams | None = None, hint: str = ""
) -> dict[str, tuple[int, ...]]:
    """Serve these together, audited after every step."""
    found: dict[str, Any] = {}
    for name, prompt in prompts.items():
        engine.add_request(prompt, params or SamplingParams(max_tokens=20), request_id=name)
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return {name: output.token_ids for name, output in found.items()}
        try:
            found |= engine.step()
        except AssertionError as error:
            raise Mismatch(f"{what}: the audit fails: {str(error).splitlines()[0]}.{hint}") from error
        for output in found.values():
            if output.error is not None:
                raise Mismatch(f"{what}: {output.error}.{hint}")
    raise Mismatch(f"{what}: after 200 steps a request has not ended.{hint}")


@grader("m5.overshoot")
def grade_overshoot(batch_class: type[ScheduleBatch]) -> str:
    """The lab's batch, repaired: what stands in the cache under a key is the KV of that key."""
    for page_size in (1, 4):
        for guess in CODES:
            _grade_continued(batch_class, page_size, guess)
    return "Wrong and right guesses, pages of 1 and 4: a request that continues an answer gets what it would get alone."


CODES = (" goat", " lamp", " ship", " river")
LIST = "The code of goat is 6706. The code of lamp is 1234. The code of ship is 4821. The code of river is 9999."


def _grade_continued(batch_class: type[ScheduleBatch], page_size: int, guess: str) -> None:
    """A request ends with a token in whose place `guess` stood; another request continues it."""
    prompt, last, follows, wanted, ids = _continued()
    with _engine_of(batch_class, page_size=page_size, parts={"proposer": always(ids[guess])}) as engine:
        params = SamplingParams(max_tokens=20, stop_token_ids=[last])
        first = _all_tokens(engine, {"first": prompt}, f"Guesses of {guess!r}", params)["first"]
        held = len(engine.engine_core.scheduler.tree_cache.match_prefix(RadixKey([*prompt, *first])).device_indices)
        room = (len(prompt) + len(first) - 1) // page_size * page_size
        most = (len(prompt) + len(first)) // page_size * page_size if ids[guess] == last else room  # it has its KV then
        got = _all_tokens(engine, {"next": follows}, f"Guesses of {guess!r}", SamplingParams(max_tokens=6))["next"]
        text_of = engine.engine_core.input_processor.tokenizer.decode
    if got != wanted:
        raise Mismatch(
            f"The first answer ends with {text_of([last])!r}, in whose place {guess!r} was guessed. A request that "
            f"continues it is told {text_of(list(got))!r}, and not {text_of(list(wanted))!r}. The newest token has no "
            f"KV: what lies in its slot is the guess's."
        )
    if held > most:
        raise Mismatch(f"{held} tokens are cached; the newest of them has no KV, so it can be {most} at most.")
    if held < room:
        raise Mismatch(f"Only {held} tokens of prompt and answer are cached; {room} have their KV in whole pages.")


@functools.cache
def _continued() -> tuple[list[int], int, list[int], tuple[int, ...], dict[str, int]]:
    """Prompt, last token of its answer, the prompt that goes on from there, what is said to it, and the guesses."""
    with new_engine() as engine:
        encode = functools.partial(engine.engine_core.input_processor.tokenizer.encode, add_special_tokens=False)
        prompt = [
            *engine.chat_prompt([{"role": "user", "content": f"{LIST} What are the codes?"}]),
            *encode("The code"),
        ]
        last = engine.generate(prompt, SamplingParams(max_tokens=2)).token_ids[1]
        follows = [*prompt, *encode(" of"), last, *encode(" is")]
        wanted = engine.generate(follows, SamplingParams(max_tokens=6)).token_ids
        return prompt, last, follows, wanted, {guess: encode(guess)[0] for guess in CODES}


@grader("m5.starved")
def grade_starved(composer: type) -> str:
    """The lab's composer, repaired: a running request gets a token at least every second step."""
    tokens: dict[str, tuple[int, ...]] = {}
    for name, count, length, budget in (("many short prompts", 12, 30, 64), ("one long prompt", 1, 600, 64)):
        gap, served, steps = _longest_wait(composer, count, length, budget)
        if gap > 2:
            raise Mismatch(
                f"{name}: the stream waits {gap} steps for a token. After a step of prompts comes one of the "
                f"running requests, or both share a step."
            )
        least = -(-count * length // budget)
        if steps > 3 * least + 60:
            raise Mismatch(f"{name}: all are done after {steps} steps; prompts must come to their end, too.")
        if served != _served_by_engine(count, length, budget):
            raise Mismatch(f"{name}: the tokens of a request have changed, or a request has not ended.")
        if count > 1 and next(iter(served)) == "stream":
            raise Mismatch(f"{name}: now they wait until the stream has ended. Nobody is to starve, prompts neither.")
        tokens |= served
    return "Many short prompts and a long one: the stream waits for one step at most, and all requests end."


def _longest_wait(composer: type, count: int, length: int, budget: int) -> tuple[int, dict[str, tuple[int, ...]], int]:
    """A stream, and prompts that come one after another: the most steps between two of its tokens, and all tokens."""
    arrived, finished, last, longest, step, batches = 0, {}, 0, 0, 0, _Batches()
    with new_engine(
        scheduler_config=SchedulerConfig(max_num_batched_tokens=budget, schedule_policy="fcfs"),
        cache_config=CacheConfig(prefix_cache="chunk", max_total_tokens=ROOM, debug=True),
        parts={"composer": lambda config, costs: composer()},
    ) as engine:
        engine.tracer.attach(batches)
        engine.add_request(ids_of(4), SamplingParams(max_tokens=24, ignore_eos=True), request_id="stream")
        while engine.has_unfinished_requests() and step < 400:
            if step >= 3 and arrived < count:
                params = SamplingParams(max_tokens=2, ignore_eos=True)
                engine.add_request(ids_of(length), params, request_id=f"prompt {arrived}")
                arrived += 1
            outputs = engine.step()
            step += 1
            for name, output in outputs.items():
                if output.error is not None:
                    raise Mismatch(f"{name!r} failed: {output.error}")
                if name == "stream":
                    longest, last = max(longest, step - (last or step)), step
                if output.finished:
                    finished[name] = output.token_ids
    largest = max(each.total_tokens for each in batches.seen)
    if largest > budget:
        raise Mismatch(f"A step has {largest} tokens, of at most {budget}: what decodes take is not left for prompts.")
    return longest, finished, step


@functools.cache
def _served_by_engine(count: int, length: int, budget: int) -> dict[str, tuple[int, ...]]:
    tokens = tokens_alone((4,), num=24)[4]
    others = tokens_alone((length,), num=2)[length]
    return {"stream": tokens} | {f"prompt {i}": others for i in range(count)}
