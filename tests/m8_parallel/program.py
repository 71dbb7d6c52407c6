"""Program of every rank of a test, under torchrun: `python -m tests.m8_parallel.program FOLDER`.

All ranks read one case after the other from the folder, `case-1.json` and so on, and do it together; rank 0 writes the
answer. So one group of processes serves many tests. A case names a function of this module, and its arguments.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import m6_multimodal_pd as m6
import m8_parallel
from m1_single_request.tracer import Tracer
from m3_paged_attention.output_processor import OutputProcessor
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m6_multimodal_pd.graph_runner import GraphCapture
from m6_multimodal_pd.overlap.late_results import LateResults
from m8_parallel import (
    CacheConfig,
    LLMEngine,
    ModelConfig,
    MultimodalConfig,
    ParallelConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    TraceConfig,
)
from m8_parallel.job import join
from m8_parallel.model_runner import ParallelModelRunner
from tests.equivalence.draws import MeasuringSampler
from tests.m6_multimodal_pd.recorded_graphs import Capture, use_static_kernels
from tests.m6_multimodal_pd.seeing import asking
from tests.m8_parallel.devices import devices
from tests.support.golden import ask, writing_engine

RANK = int(os.environ.get("RANK", 0))
PROMPTS = [[5, 6, 7] * 7, list(range(40, 90)), [9], [*range(40, 80), 3, 3]]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=2),
    SamplingParams(max_tokens=12, prompt_logprobs=1),
    SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=4),
]
QUESTIONS: list[tuple[str | int, ...]] = [("a", 1), (2,), ("v", "b", 2), ("a", "a", 3)]


def configs(
    model: str,
    *,
    backend: str = "torch",
    chunks: bool = False,
    cache: str = "radix",
    drafts: str = "none",
    disk: str | None = None,
    int8: str = "nothing",
    late: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """Configurations of an engine, with ranks or without."""
    quantization = "int8" if int8 == "weights" else None
    found: dict[str, Any] = {
        "model_config": ModelConfig(
            model=model, device="cpu", dtype="float32", attention_backend=backend, quantization=quantization
        )
    }
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4} if chunks else {}
    found["scheduler_config"] = SchedulerConfig(**limits, enable_overlap=late or None)
    of_cache: dict[str, Any] = {"kv_cache_dtype": "int8" if int8 == "kv" else "auto"}
    if cache == "tiers":
        of_cache |= {"max_total_tokens": 288, "host_memory_bytes": 2**20, "disk_path": disk}
    elif cache == "tight":
        of_cache |= {"max_total_tokens": 176, "page_size": 4}
    found["cache_config"] = CacheConfig(**of_cache)
    if drafts == "ngram":
        found["speculative_config"] = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    elif drafts == "draft_model":
        found["speculative_config"] = SpeculativeConfig(method="draft_model", model=model, num_speculative_tokens=3)
    return found


def drawn(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, some with the same beginning, and parameters of each."""
    rng = Random(seed)
    shared = [rng.randrange(3, 400) for _ in range(40)]
    prompts = [
        [*shared[: rng.randrange(41)], *(rng.randrange(3, 400) for _ in range(rng.randrange(1, 50)))] for _ in range(6)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 14),
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0.0, 0.0, 0.9)),
            seed=rng.randrange(100),
            prompt_logprobs=rng.choice((None, None, 1)),
            top_k=5,  # of many tokens some draw is always near another one
            repetition_penalty=rng.choice((1.0, 1.2)),
        )
        for _ in prompts
    ]
    return prompts, params


def answers(engine: Any, model: str, times: int = 2, **how: Any) -> list[Any]:
    """The tokens of all outputs, asked several times: later from the cache. `how`: as `asked`."""
    found = []
    for _ in range(times):
        for output in engine.generate_batch(*asked(engine, model, **how)).values():
            assert output.error is None, output.error
            found.append(ends_of(output))
    return found


def asked(
    engine: Any, model: str, *, seed: int | None = None, greedy: bool = False
) -> tuple[list[Any], list[SamplingParams]]:
    """The prompts of `answers`, and the parameters of each. `seed`: of random prompts. `greedy`: nothing is drawn."""
    if (Path(model) / "preprocessor_config.json").exists():
        prompts = [engine.chat_prompt(asking(*question)) for question in QUESTIONS]
        return prompts, [SamplingParams(max_tokens=10, ignore_eos=True)] * len(prompts)
    prompts, params = (PROMPTS, PARAMS) if seed is None else drawn(seed)
    return prompts, [replace(each, temperature=0.0) for each in params] if greedy else params


def without_near_ties(model: str, together: list[Any], alone: list[Any], **how: Any) -> list[Any]:
    """The answers `together`, with those of `alone` from the first choice on that was not clear. `how`: as `asked`."""
    if together == alone:
        return together
    sampler, kept = MeasuringSampler(), []
    with m6.LLMEngine(**configs(model), parts={"sampler": lambda: sampler}) as engine:
        prompts, params = asked(engine, model, **how)
        for number, (own, other) in enumerate(zip(together, alone, strict=True)):
            prompt, param = prompts[number % len(prompts)], params[number % len(prompts)]
            kept.append(list(own))
            for child in [child for child in range(len(own)) if own[child] != other[child]]:
                sampler.margins.clear()
                child_seed = None if param.seed is None else param.seed + child
                engine.generate(prompt, replace(param, n=1, seed=child_seed, prompt_logprobs=None))
                clear = next((i for i, margin in enumerate(sampler.margins) if margin < 1), len(own[child]))
                kept[-1][child] = own[child][:clear] + other[child][clear:]
    return kept


def parallel(experts: bool = False) -> dict[str, Any]:
    """Ranks that compare every decision."""
    return {"parallel_config": ParallelConfig(digest_interval=1, expert_parallel=experts)}


# --- cases ------------------------------------------------------------------------------------------------------------


def same(
    model: str,
    experts: bool = False,
    seed: int | None = None,
    graphs: bool = False,
    late: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The answers of all ranks, and of one process, which has neither graphs nor a step in flight."""
    # what is drawn behind drafts keeps its distribution only, where a draft model guesses behind a step in flight
    how = {"seed": seed, "greedy": late and settings.get("drafts") == "draft_model"}
    seen, given = Seen("step_launched", "graphs_captured"), configs(model, **settings, late=late)
    given["trace_config"] = TraceConfig(readers=(seen,))
    with devices(graphs=graphs, late=late, seed=seed) as made, LLMEngine(**given, **parallel(experts)) as engine:
        together = answers(engine, model, **how)
        stats = engine.stats()
    with m6.LLMEngine(**configs(model, **settings)) as engine:
        alone = answers(engine, model, **how)
    if RANK == 0:
        together = without_near_ties(model, together, alone, **how)
    launched = [event for event in seen.events if event.kind == "step_launched"]
    return {
        "together": together,
        "alone": alone,
        "held": stats.kv_tokens,
        "ranks": list(map(vars, stats.ranks)),
        "num_replays": sum(graph.num_replays for graph in made),
        "num_captured": len(seen.events) - len(launched),
        "num_behind": sum(event.behind is not None and event.waited_for is None for event in launched),
    }


def step(model: str, num_requests: int, graphs: bool = False) -> dict[str, Any]:
    """The collectives of each step of a batch."""
    seen = Seen("collectives")
    given = configs(model) | {"trace_config": TraceConfig(readers=(seen,))}
    with devices(graphs=graphs), LLMEngine(**given, parallel_config=ParallelConfig()) as engine:
        engine.generate_batch([[7, 8, 9]] * num_requests, SamplingParams(max_tokens=3, ignore_eos=True))
    return {"steps": [[event.kinds, event.sizes] for event in seen.events]}


def chosen(model: str) -> dict[str, Any]:
    """How many tokens use each expert in each step, by the traces of ranks with whole experts and of one process."""
    found = []
    for cls in (LLMEngine, m6.LLMEngine):
        seen = Seen("experts_used")
        given = configs(model) | {"trace_config": TraceConfig(experts=True, readers=(seen,))}
        with cls(**given, **(parallel(experts=True) if cls is LLMEngine else {})) as engine:
            engine.generate_batch(PROMPTS, PARAMS[0])
        found.append([[event.num_experts, event.loads] for event in seen.events])
    return {"together": found[0], "alone": found[1]}


def logprobs(model: str, experts: bool = False, **settings: Any) -> dict[str, Any]:
    """The log-probabilities of the tokens of each prompt: of all ranks, and of one process."""
    given = configs(model, **settings)
    with LLMEngine(**given, **parallel(experts)) as engine:
        found = rated(engine)
    with m6.LLMEngine(**given) as engine:
        return {"found": found, "alone": rated(engine)}


def rated(engine: Any) -> list[list[float]]:
    """The log-probabilities of the tokens of each prompt, whose first half comes from the cache if there is one."""
    engine.generate_batch([prompt[: len(prompt) // 2] for prompt in PROMPTS if len(prompt) > 1], PARAMS[0])
    outputs, found = engine.generate_batch(PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=0)), []
    for output, prompt in zip(outputs.values(), PROMPTS, strict=True):
        rows = (output.prompt_logprobs or [])[1:]
        found.append([row[token].logprob for row, token in zip(rows, prompt[1:], strict=True)])
    return found


def golden(path: str) -> dict[str, Any]:
    """The stable traces of two requests, a file for each rank."""
    own = Path(path) if RANK == 0 else Path(path).with_suffix(f".rank-{RANK}.jsonl")
    with writing_engine(m8_parallel, own) as engine:
        ask(engine, "first", "What is prefill?", max_tokens=6, ignore_eos=True)
        engine.step()
        ask(engine, "second", "What is decode?", max_tokens=4, ignore_eos=True)
        while engine.has_unfinished_requests():
            engine.step()
    return {}


class Seen:
    """Keeps the events of some kinds."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.events = kinds, list[Any]()

    def read(self, record: Any) -> None:
        """Take an event."""
        if record.event.kind in self.kinds:
            self.events.append(record.event)

    def close(self) -> None:
        """Do nothing."""


class Failing(ParallelModelRunner):
    """Fails once on one rank: in the phase `where` of its third step. In `queued` see `LateRank`, in `sample`
    `FailingInSample`, in `counted` `fail`."""

    rank, where, calls = 0, "", 0

    def fail(self, where: str) -> None:
        """Fail if this is the phase."""
        if where == self.where and self.rank == RANK:
            self.calls += 1
            if self.calls == 3:
                raise MemoryError("no memory left")

    def drafted(self, batch: Any) -> Any:
        """Fail before the drafts are sent."""
        self.fail("drafts")
        return super().drafted(batch)

    def forward(self, batch: Any) -> torch.Tensor:
        """Fail before, or between two layers."""
        self.fail("before")
        if self.where == "logits" and not hasattr(self, "_head"):
            self._head, self.model.head = self.model.head, self._without_logits
        if self.where == "between" and self.rank == RANK:
            layer = self.model.layers[-1]
            mlp, layer.mlp = layer.mlp, self._failing  # type: ignore[assignment]
            self._mlp = mlp
            try:
                return super().forward(batch)
            finally:
                layer.mlp = mlp
        return super().forward(batch)

    def _without_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.fail("logits")
        return self._head(hidden)

    def _failing(self, hidden: torch.Tensor) -> torch.Tensor:
        self.fail("between")
        return self._mlp(hidden)


class FailingInSample(Failing):
    """A runner with a `sample` of its own: also where steps overlap, it chooses the tokens on the host."""

    def sample(self, *args: Any) -> Any:
        """Fail after the forward."""
        self.fail("sample")
        return super().sample(*args)


def fail(
    model: str,
    rank: int,
    where: str,
    graphs: bool = False,
    late: bool = False,
    queued: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """What a request gets whose step fails on one rank, and what comes after it."""
    base = FailingInSample if where == "sample" else Failing
    part = {"model_runner": type("Failing", (base,), {"rank": rank, "where": where})}
    given = configs(model, **settings, late=late)
    # a forward fails on the host, when it is launched; its tokens may be late all the same
    device, captures, calls = devices(graphs=graphs, late=late, queued=queued, at_once=1.0), list[Any](), list[int]()
    capture, expect = GraphCapture.capture, LateResults.expect

    def count(*args: Any) -> None:
        calls.append(1)
        if where == "counted" and rank == RANK and len(calls) == 3:
            raise MemoryError("no memory left")
        expect(*args)

    penalised = replace(PARAMS[0], repetition_penalty=1.1) if where == "counted" else PARAMS[0]
    with device as made, pytest.MonkeyPatch.context() as patch, ExitStack() as closing:
        patch.setattr(LateResults, "expect", count)
        engine = closing.enter_context(LLMEngine(**given, **parallel(), parts=part))
        num_graphs, core = len(made), engine.engine_core

        def note_capture(*args: Any) -> None:
            captures.append(getattr(core, "in_flight", None) is None)
            capture(*args)

        patch.setattr(GraphCapture, "capture", note_capture)
        failed = engine.generate(PROMPTS[0], penalised)
        after, held = answers(engine, model), engine.stats().kv_tokens
        num_groups = [path.read_text("utf-8") for path in Path("/proc/self/task").glob("*/comm")].count(
            "gloo_tcp_loop\n"
        )
    with m6.LLMEngine(**configs(model, **settings)) as engine:
        alone = answers(engine, model)
    error = failed.error
    return {
        "error": str(error),
        "together": after,
        "alone": alone,
        "held": held,
        "num_groups": num_groups,
        "num_graphs": [num_graphs, len(made)],
        "num_replays": [graph.num_replays for graph in made],
        "captured_between_steps": captures,
    }


def apart() -> dict[str, Any]:
    """The error of a part of a step that has no collective, and fails on rank 1 alone."""
    ranks = join(step_timeout_s=10.0, long_timeout_s=60.0, on_gpu=False)
    runner: Any = ParallelModelRunner.__new__(ParallelModelRunner)
    runner.ranks, runner.tracer, runner.graph_capture = ranks, Tracer(), None
    runner.encoder = SimpleNamespace(clear=list)

    def part() -> None:
        if RANK == 1:
            raise MemoryError("no memory left")

    errors = []
    try:
        runner.on_all_ranks(part)
    except Exception as error:
        errors.append(str(error))
    runner.on_all_ranks(lambda: None)
    ranks.close()
    return {"errors": errors}


def on_cpus(model: str, backend: str) -> dict[str, Any]:
    """Why the steps of ranks on CPUs do not overlap, though they may."""
    seen = Seen("normal_order")
    given = configs(model, backend=backend, late=True) | {"trace_config": TraceConfig(readers=(seen,))}
    with LLMEngine(**given, **parallel()) as engine:
        tokens = list(engine.generate(PROMPTS[0], PARAMS[0]).token_ids)
    return {"reasons": [event.reason for event in seen.events], "num_tokens": len(tokens)}


def uncapturable(model: str, rank: int, what: str) -> dict[str, Any]:
    """The answers of ranks, one of which cannot capture its steps, or the steps of its draft model, or an all-reduce; a
    step fails between them."""
    seen, tries = Seen("graphs_unavailable", "graphs_captured"), list[str]()
    drafts = "draft_model" if what == "draft" else "none"
    given = configs(model, drafts=drafts) | {"trace_config": TraceConfig(readers=(seen,))}
    capture = GraphCapture.capture

    def note_try(self: Any, name: str, *args: Any) -> None:
        tries.append(name)
        capture(self, name, *args)

    def is_refused() -> bool:
        return rank == RANK and what in ("step", *tries[-1:])

    def enter(self: Capture) -> Capture:
        if is_refused():
            raise torch.OutOfMemoryError("no memory for a graph")
        return begin(self)

    begin, part = Capture.__enter__, {"model_runner": type("Failing", (Failing,), {"rank": rank, "where": "before"})}
    with devices(graphs=True) as made, pytest.MonkeyPatch.context() as patch:
        use_static_kernels(patch)  # of a draft model
        all_reduce = torch.distributed.all_reduce

        def reduce(*args: Any) -> Any:
            if rank == RANK and what == "all-reduce" and Capture.active is not None:
                raise RuntimeError("no such operation in a capture")
            return all_reduce(*args)

        patch.setattr(torch.distributed, "all_reduce", reduce)
        patch.setattr(GraphCapture, "capture", note_try)
        patch.setattr(Capture, "__enter__", enter)
        with LLMEngine(**given, **parallel(), parts=part) as engine:
            failed = engine.generate(PROMPTS[0], PARAMS[0])
            together = answers(engine, model, 1, greedy=drafts != "none")
            num_replays = sum(graph.num_replays for graph in made)
    with m6.LLMEngine(**configs(model)) as engine:
        alone = answers(engine, model, 1, greedy=drafts != "none")
    return {
        "error": str(failed.error),
        "together": together,
        "alone": alone,
        "num_replays": num_replays,
        "tries": tries,
        "reasons": [event.reason for event in seen.events if event.kind == "graphs_unavailable"],
        "events": [[event.kind, event.model] for event in seen.events],
    }


def blocked(model: str) -> dict[str, Any]:
    """The error of a step that fails on rank 1, while the host of rank 0 waits in C for its device."""
    part = {"model_runner": type("Failing", (Blocked if RANK == 0 else Failing,), {"rank": 1, "where": "before"})}
    with LLMEngine(**configs(model), **parallel(), parts=part) as engine:
        began, failed = time.monotonic(), engine.generate(PROMPTS[0], PARAMS[0])
        seconds, after = time.monotonic() - began, answers(engine, model, 1)
    with m6.LLMEngine(**configs(model)) as engine:
        alone = answers(engine, model, 1)
    return {"error": str(failed.error), "seconds": seconds, "together": after, "alone": alone}


class Blocked(ParallelModelRunner):
    """In its third step the host waits until its group is aborted."""

    rank, where, calls = 0, "", 0

    def forward(self, batch: Any) -> torch.Tensor:
        """Wait, and compute."""
        self.calls += 1
        if self.calls == 3:
            is_aborted = Event()
            self.ranks.watch.guard(f"left {self.ranks.num_groups}", is_aborted.set)
            assert is_aborted.wait(30)
        return super().forward(batch)


def use(model: str, other: str, folder: str, late: bool = False) -> dict[str, Any]:
    """All verbs of the face."""
    found: dict[str, Any] = {}
    trace = TraceConfig(jsonl=f"{folder}/trace.jsonl", chrome=f"{folder}/trace.json")
    with (
        devices(graphs=late, late=late),
        LLMEngine(**configs(model, late=late), **parallel(), trace_config=trace) as engine,
    ):
        found["first"] = answers(engine, model, 1)
        engine.start_profile(f"{folder}/profile")
        engine.add_request(PROMPTS[0], PARAMS[0], request_id="aborted")
        engine.step()
        engine.abort_request("aborted")
        while engine.has_unfinished_requests():
            engine.step()
        found["profiles"] = [str(path) for path in engine.stop_profile()]
        found["flushed"] = engine.flush_cache()
        errors = []
        for call in (
            engine.stop_profile,
            lambda: engine.update_weights(f"{folder}/none"),
            lambda: engine.flush_cache(5),  # type: ignore[arg-type]
            lambda: engine.flush_cache("disk"),
            lambda: engine.start_profile(f"{folder}/trace.jsonl"),
        ):
            try:
                call()
            except m6.EngineError as error:
                errors.append(f"{type(error).__name__}: {error}")
        found["errors"] = errors
        engine.update_weights(other)
        found["other"] = answers(engine, model, 1)
        engine.update_weights(model)
        found["again"] = answers(engine, model, 1)
    with m6.LLMEngine(**configs(other)) as engine:
        found["alone"] = answers(engine, other, 1)
    return found


def end(model: str, late: bool = False) -> dict[str, Any]:
    """What is left of requests with several outputs that are aborted at work, and of one beside them."""
    found, given = [], configs(model, chunks=True, late=late)
    for cls in (LLMEngine, m6.LLMEngine):
        with devices(late=late), cls(**given, **(parallel() if cls is LLMEngine else {})) as engine:
            several = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=1, prompt_logprobs=1, ignore_eos=True)
            for rid, params in (("several", several), ("kept", PARAMS[3]), ("waits", several), ("alone", PARAMS[0])):
                engine.add_request(PROMPTS[1], params, request_id=rid)
            outputs: dict[str, Any] = {}
            for number in range(100):
                outputs |= engine.step()
                if number == 6:
                    found.append(engine.abort_request("several"))
                    found.append(engine.abort_request("waits"))
            engine.add_request(PROMPTS[2], PARAMS[2], request_id="later")
            found.append(engine.abort_request("later"))
            while engine.has_unfinished_requests():
                outputs |= engine.step()
            found.append({rid: [str(each.finish_reason), ends_of(each)] for rid, each in sorted(outputs.items())})
            found.append(engine.stats().kv_tokens)
    return {"together": found[: len(found) // 2], "alone": found[len(found) // 2 :]}


class Spoiling(OutputProcessor):
    """Fails at the third output of a request, which only rank 0 makes: the others make the last one."""

    def make_output(self, request: Any) -> Any:
        """Return the output."""
        if request.request_id == "spoilt" and len(request.output_ids) == 3:
            raise ValueError("no words for this token")
        return super().make_output(request)


def spoil(model: str, late: bool = False) -> dict[str, Any]:
    """The ends of requests, the outputs of one of which cannot be made."""
    found, given = [], configs(model, chunks=True, late=late)
    for cls in (LLMEngine, m6.LLMEngine):
        more = parallel() if cls is LLMEngine else {}
        with devices(late=late), cls(**given, **more, parts={"output_processor": Spoiling}) as engine:
            for rid, prompt in (("kept", PROMPTS[0]), ("spoilt", PROMPTS[2])):
                engine.add_request(prompt, PARAMS[0], request_id=rid)
            outputs: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                outputs |= engine.step()
            found.append([[rid, str(each.error), ends_of(each)] for rid, each in sorted(outputs.items())])
            found[-1] += [answers(engine, model, 1), engine.stats().kv_tokens]
    return {"together": found[0], "alone": found[1]}


def ends_of(output: Any) -> list[Any]:
    """The tokens of each output of a request."""
    return [list(one.token_ids) for one in getattr(output, "outputs", None) or [output]]


def read(model: str, late: bool = False, **settings: Any) -> dict[str, Any]:
    """The answers of engines that read images in processes of their own; some images are broken, and some requests are
    aborted while theirs are read."""
    given = configs(model, **settings, late=late) | {"multimodal_config": MultimodalConfig(num_media_processes=1)}
    found = []
    for cls in (LLMEngine, m6.LLMEngine):
        with devices(late=late), cls(**given, **(parallel() if cls is LLMEngine else {})) as engine:
            found.append([read_by(engine, QUESTIONS, n) for n in (1, 2)])
            found[-1] += [read_by(engine, questions, n) for questions in BROKEN for n in (1, 2)]
            engine.add_request(asking("b", 3), SamplingParams(n=2), request_id="aborted")
            engine.add_request(asking("b", 2), SamplingParams(max_tokens=5), request_id="kept")
            engine.abort_request("aborted")
            outputs: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                outputs |= engine.step()
            found[-1] += [[rid, str(each.finish_reason), ends_of(each)] for rid, each in sorted(outputs.items())]
            found[-1].append(engine.stats().kv_tokens)
    return {"together": found[0], "alone": found[1]}


NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BROKEN: list[list[Any]] = [[[NO_IMAGE]], [("a", 1), [NO_IMAGE], ("b",)], [("a", "b"), [NO_IMAGE], [NO_IMAGE]]]
"""Questions as `asking` takes them, and contents of a message."""


def read_by(engine: Any, questions: Sequence[Any], n: int) -> list[Any]:
    """The answers to questions that arrive together: tokens, or the name of the error."""
    prompts = [
        [{"role": "user", "content": [*each, {"type": "text", "text": "What is it?"}]}]
        if isinstance(each, list)
        else asking(*each)
        for each in questions
    ]
    outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=6, n=n, temperature=1.0, seed=7))
    return [type(output.error).__name__ if output.error else ends_of(output) for output in outputs.values()]


def many(model: str) -> dict[str, Any]:
    """The answers to many requests with many images each, and to one with many log-probabilities."""
    prompt, found = asking(*"ab" * 10, 1), []
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, n=14)]
    rated = SamplingParams(max_tokens=1, prompt_logprobs=2000)
    for cls in (LLMEngine, m6.LLMEngine):
        with cls(**configs(model), **(parallel() if cls is LLMEngine else {})) as engine:
            found.append([ends_of(output) for output in engine.generate_batch([prompt] * 2, params).values()])
            rows = engine.generate([number % 90 + 3 for number in range(400)], rated).prompt_logprobs or []
            found[-1].append([len(row or ()) for row in rows])
    return {"together": found[0], "alone": found[1]}


def forget(model: str) -> dict[str, Any]:
    """The tokens of engines that nobody closes."""
    found = []
    for _ in range(2):
        try:
            found.append(list(LLMEngine(**configs(model)).generate(PROMPTS[0], PARAMS[0]).token_ids))
        except SystemExit:
            if RANK == 0:
                raise
    return {"found": found}


def restart(model: str, disk: str) -> dict[str, Any]:
    """A long prompt, whose KV a second engine finds on the disks of all ranks."""
    given = configs(model) | {
        "cache_config": CacheConfig(host_memory_bytes=2**22, disk_path=disk, prefetch_policy="wait_complete")
    }
    prompt, found = [number % 60 + 3 for number in range(400)], []
    for _ in range(2):
        try:
            with LLMEngine(**given, **parallel()) as engine:
                output = engine.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
                found.append([list(output.token_ids), engine.stats().num_disk_hit_tokens])
        except SystemExit:
            if RANK == 0:
                raise
    return {"found": found}


def wrong(model: str) -> dict[str, Any]:
    """Settings that ranks cannot follow."""
    found, given = [], configs(model)
    trace = TraceConfig(chrome=None if RANK else os.devnull)
    for settings in (
        {"parallel_config": ParallelConfig(tensor_parallel_size=3)},
        {"parallel_config": ParallelConfig(expert_parallel=True)},
        configs(model, chunks=RANK == 1),
        {"trace_config": trace},
    ):
        try:
            LLMEngine(**given | settings)
        except m6.EngineError as error:
            found.append(f"{type(error).__name__}: {error}")
    return {"found": found}


class Differing(SchedulePolicy):
    """Has requests in another order on other ranks, as a set may have."""

    def calc_priority(self, waiting: Any, admitted: Any) -> Any:
        """Return the order."""
        found = super().calc_priority(waiting, admitted)
        return found._replace(ready=found.ready[::-1]) if RANK else found


def differ(model: str, late: bool) -> dict[str, Any]:
    """Ranks that decide differently; the job ends."""
    with devices(late=late):
        given = configs(model, chunks=True, late=late)
        engine = LLMEngine(**given, **parallel(), parts={"schedule_policy": Differing})
        outputs = engine.generate_batch(PROMPTS, PARAMS[0])
    return {"errors": [f"{type(output.error).__name__}: {output.error}" for output in outputs.values()]}


def busy(model: str, folder: str, idle: bool) -> dict[str, Any]:
    """Answers until a rank is lost; then each survivor writes its error. `idle`: the user thinks all the time."""
    root = Path(folder)
    (root / f"pid-{RANK}").write_text(str(os.getpid()), encoding="utf-8")
    try:
        with LLMEngine(**configs(model), parallel_config=ParallelConfig()) as engine:
            (root / "ready").touch()
            while True:
                if idle:
                    time.sleep(0.05)
                else:
                    for output in engine.generate_batch(PROMPTS, PARAMS).values():
                        if isinstance(output.error, m6.EngineDeadError):
                            raise output.error
    except m6.EngineError as error:
        (root / f"lost-{RANK}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


CASES = {
    function.__name__: function
    for function in (
        same,
        step,
        chosen,
        logprobs,
        golden,
        fail,
        apart,
        spoil,
        on_cpus,
        uncapturable,
        blocked,
        use,
        end,
        read,
        many,
        forget,
        restart,
        wrong,
        differ,
        busy,
    )
}


def serve(folder: Path) -> None:
    """Do the cases of a folder, until one is `null`."""
    number = 0
    while True:
        number += 1
        path = folder / f"case-{number}.json"
        while not path.exists():
            time.sleep(0.01)
        case = json.loads(path.read_text("utf-8"))
        if case is None:
            return
        try:
            result = CASES[case.pop("case")](**case)
        except SystemExit:
            continue
        if RANK == 0:
            written = path.with_suffix(".tmp")
            written.write_text(json.dumps(result), encoding="utf-8")
            written.rename(folder / f"answer-{number}.json")


def main(arguments: Sequence[str]) -> None:
    """Serve a folder."""
    torch.set_num_threads(1)
    serve(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
