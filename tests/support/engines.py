"""What the engine tests of every milestone share: one tiny random model, engines around it, readers of the trace.

Loading is the slow part of an engine, so the tiny model is loaded once and every engine of a test is built around it.
`EngineMaker.check` looks at all of them after the test: their queues must agree, and nothing may be held when the work
is done or the engine is closed. The answers of m1, to which most tests compare, are computed once for all of them.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import m1_single_request
from m1_single_request import RequestOutput, SamplingParams, Tracer, TraceRecord
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.kv_dtype import KV_DTYPES
from tests.equivalence.models import save_random_model

MAX_MODEL_LEN = 256
MANY_STEPS = 1000
MOST_STEPS = 20_000  # of one engine, whatever it is asked


def save_tiny_model(directory: Path) -> Path:
    """A Qwen3 of random weights whose only end-of-sequence id is the tokenizer's, saved in `directory`.

    The native kernels of m3 and later attend with heads of 32, 64, ...; with other widths torch does it, unseen.
    """
    return save_random_model(
        directory,
        "qwen3",
        stop_ids=(),
        hidden_size=32,
        head_dim=32,
        intermediate_size=64,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_MODEL_LEN,
    )


class EngineMaker:
    """`make_engine(parts, seed=..., ...)`: an engine of one milestone around its loaded model, changed by arguments."""

    def __init__(self, package: ModuleType, loaded: Any) -> None:
        self.package = package
        self.loaded = loaded
        self.engines: list[Any] = []

    def __call__(
        self,
        parts: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_template: str | None = None,
        **configs: Any,
    ) -> Any:
        changes: dict[str, Any] = {"max_model_len": max_model_len or self.loaded.max_model_len}
        if eos_token_ids is not None:
            changes["eos_token_ids"] = frozenset(eos_token_ids)
        if chat_template is not None:
            changes["tokenizer"] = copy.deepcopy(self.loaded.tokenizer)
            changes["tokenizer"].chat_template = chat_template

        def load(config: Any, kv_cache_dtype: str = "auto") -> Any:
            loaded = dataclasses.replace(self.model_of(config), **changes)
            if hasattr(loaded.model, "kv_dtype"):  # from m3 on
                loaded.model.kv_dtype = KV_DTYPES.get(kv_cache_dtype, loaded.dtype)
            return loaded

        table = {"model_loader": load, **(parts or {})}
        model_config = self.package.ModelConfig(model=self.loaded.name, device="cpu", dtype="float32", seed=seed)
        self.engines.append(bounded(self.package.LLMEngine(model_config=model_config, parts=table, **configs)))
        return self.engines[-1]

    def model_of(self, config: Any) -> Any:
        """The loaded model that is meant."""
        return self.loaded

    def check(self, *more: Callable[[Any], object]) -> None:
        """Look at every engine that was made, with `more` checks once it is closed."""
        for engine in self.engines:
            check_nothing_is_held(engine)
            for check_closed in more:
                check_closed(engine)


MakeEngine = EngineMaker
"""What the fixtures `make_engine` give."""


Answers = dict[tuple[str, str], RequestOutput]
"""The answer to a prompt with these parameters, both as `repr` shows them."""


class Remembered:
    """An engine of m1 as far as it gives the right answers, each of them computed once for all tests.

    A greedy or seeded answer depends on nothing else. Others depend on the number of the request, so they come from an
    engine of the test's own, and only before anything was remembered.
    """

    def __init__(self, make: Callable[[], Any], answers: Answers) -> None:
        """`make` an engine when one is needed; `answers`: those that are known."""
        self.engine = cache(make)
        self.answers = answers
        self.is_fresh = True

    def generate(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        """The answer to one prompt."""
        assert repeats(params)
        self.is_fresh = False
        key = repr(prompt), repr(params)
        if key not in self.answers:
            self.answers[key] = self.engine().generate(prompt, params)
        return self.answers[key]

    def generate_batch(
        self, prompts: Sequence[str | list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> dict[str, RequestOutput]:
        """The answers to several prompts, in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if all(map(repeats, each)):
            pairs = enumerate(zip(prompts, each, strict=True))
            return {str(number): self.generate(prompt, own) for number, (prompt, own) in pairs}
        assert self.is_fresh, "the engine has not counted the requests whose answers were known"
        answers: dict[str, RequestOutput] = self.engine().generate_batch(prompts, params)
        return answers


def repeats(params: SamplingParams) -> bool:
    """Whether the answer is always the same."""
    return params.is_greedy or params.seed is not None


class RememberingMaker(EngineMaker):
    """The same for m1, whose answers are the ones to give: without parts of its own it is one that remembers."""

    def __init__(self, loaded: LoadedModel, answers: dict[str, Answers]) -> None:
        """`answers`: for each engine those that are known."""
        super().__init__(m1_single_request, loaded)
        self.answers = answers

    def __call__(self, parts: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        make = partial(super().__call__, parts, **changes)
        if parts:
            return make()
        return Remembered(make, self.answers.setdefault(f"{self.loaded.name} {sorted(changes.items())}", {}))


def bounded(engine: Any) -> Any:
    """The engine itself. After very many steps the next one fails.

    `generate`, `generate_batch` and streams step until a request has ended: one that never does would hang its test.
    """
    core, run_step, left = engine.engine_core, engine.engine_core.run_step, MOST_STEPS

    def counted() -> Any:
        nonlocal left
        assert left > 0, f"{MOST_STEPS} steps and no end: some request neither runs nor ends"
        left -= 1
        return run_step()

    core.run_step = counted
    return engine


def check_nothing_is_held(engine: Any) -> None:
    """Let an engine end what a test left behind, then look whether anything stayed; closes it."""
    core = engine.engine_core
    if not engine._closed:
        check_invariants(core)
    if core.dead is None and not engine._closed:
        for _ in unfinished(engine):
            engine.step()
            check_invariants(core)
        assert not core.scheduler.requests
    if not core.scheduler.requests or engine._closed:
        assert held(engine) == 0
    engine.close()
    assert held(engine) == 0


def check_invariants(core: Any) -> None:
    """Queues and memory agree. Steps that overlap are the engine core's to look at, others the scheduler's."""
    getattr(core, "check_invariants", core.scheduler.check_invariants)()


def held(engine: Any) -> int:
    """Tokens whose KV the engine holds."""
    return int(engine.stats().kv_tokens)


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """Greedy parameters that only end at their length, unless `params` change that."""
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | params)


def ids(length: int, first: int = 5) -> list[int]:
    """A prompt of this length."""
    return list(range(first, first + length))


def unfinished(engine: Any) -> Iterator[None]:
    """`for _ in unfinished(engine): engine.step()`, which fails instead of going on for ever."""
    for _ in range(MANY_STEPS):
        if not engine.has_unfinished_requests():
            return
        yield
    raise AssertionError(f"the engine is not done after {MANY_STEPS} steps")


def check_queues(engine: Any) -> None:
    """The queues of the scheduler agree."""
    check_invariants(engine.engine_core)


def drain(engine: Any, check_step: Callable[[Any], object] = check_queues) -> dict[str, Any]:
    """Step until nothing is left, with a look at the engine after each step; the last output of every request."""
    last: dict[str, Any] = {}
    for _ in unfinished(engine):
        outputs = engine.step()
        check_step(engine)
        assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported again after its end"
        last |= outputs
    return last


def check_begun(output: Any, whole: RequestOutput) -> None:
    """The tokens of an output or a completion are the first of `whole`; all, unless it failed or was aborted."""
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert output.finish_reason in ("error", "abort") or output.token_ids == whole.token_ids


class Recorder:
    """A trace reader that keeps everything, attached to `tracer` or handed over in a `TraceConfig`."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.records: list[TraceRecord] = []
        if tracer is not None:
            tracer.attach(self)

    def read(self, record: TraceRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        """Nothing to do."""

    def kinds(self) -> list[str]:
        """The kinds of all events so far."""
        return [record.event.kind for record in self.records]

    def events(self, kind: str) -> list[Any]:
        """All events of one kind so far."""
        return [record.event for record in self.records if record.event.kind == kind]


class OnEvent:
    """A trace reader that acts once: at the `nth` event of `kind` (of request `rid`, if given)."""

    def __init__(
        self, tracer: Tracer, kind: str, action: Callable[[], Any], *, nth: int = 1, rid: str | None = None
    ) -> None:
        self.kind, self.action, self.left, self.rid = kind, action, nth, rid
        self.result: Any = None
        self.error: BaseException | None = None
        tracer.attach(self)

    def read(self, record: TraceRecord) -> None:
        event: Any = record.event
        rids = getattr(event, "rids", (getattr(event, "rid", None),))
        if event.kind != self.kind or (self.rid is not None and self.rid not in rids):
            return
        self.left -= 1
        if self.left == 0:
            try:
                self.result = self.action()
            except Exception as error:
                self.error = error

    def close(self) -> None:
        """Nothing to do."""

    @property
    def acted(self) -> bool:
        return self.left <= 0
