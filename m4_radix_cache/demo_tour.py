"""Tour of the demo: many users of one system prompt, a conversation, and a memory that is too small.

Part of `python -m m4_radix_cache.demo`; no part of the engine depends on it. The remark that opens a part is the text
of its function's docstring. The model that ships explains terms of LLM inference and restates codes from its prompt, so
a wrong page in the cache would show in an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, prompt_of
from m1_single_request.events import Event, RequestAdded, some
from m1_single_request.input_processor import Message
from m1_single_request.trace_readers import Records, readers_of
from m1_single_request.tracer import TraceReader
from m2_continuous_batching.demo_tour import in_turn, open_part, same_answers
from m3_paged_attention.demo_tour import several, with_room
from m4_radix_cache import LLMEngine, RequestOutput, SamplingParams
from m4_radix_cache.events import Admit, Audit, Matched, PolicyOrder, Retract
from m4_radix_cache.mem_cache.events import Evicted
from m4_radix_cache.views.radix_tree import KEY, RadixTreeView

PLENTY = 8192  # tokens of KV memory: enough, and numbers that a reader can add up
LITTLE = 400  # tokens in part 4: a little less than its requests fill at most, so that one is retracted
CONSERVATIVENESS = 0.1  # admits requests for which there is no room in the end
EVERY, MOST_OUTPUT = 2, 48  # in part 4: steps between two arrivals, and tokens of an answer
ROUNDS = 3  # of a measurement
RECORDED, RECORDED_ON = {"with shared KV": 0.085, "without": 0.464}, "2 cores of an AMD EPYC"
"""Mean seconds to the first token, from `benchmarks/results/m4_radix_cache.md`."""
NOUNS = (
    "zebra otter lamp eagle candle goat kite river tiger spoon anchor bridge castle dragon forest garden hammer "
    "island jacket ladder mirror needle ocean pencil queen rocket saddle table velvet wagon acorn basket camel "
    "donkey engine feather guitar helmet igloo jungle kettle lemon magnet noodle"
).split()
TERMS = ("prefix caching", "a radix tree", "LRU", "continuous batching", "paged attention", "cache eviction")
CHAT = ("What is prefix caching?", "What is the code of lamp?", "What is LRU?", "What is the code of zebra?")
"""Turns of the conversation; the last takes the place of the one before it."""
DECISIONS = (RequestAdded, PolicyOrder, Matched, Admit)

T = TypeVar("T")


class Stage:
    """Builds the engines of a tour, which share the readers of the trace, and runs its requests with equal options."""

    engine_class: ClassVar[Any] = LLMEngine

    def __init__(
        self, configs: Mapping[str, Any], params: SamplingParams, options: Mapping[str, Any], console: Console
    ) -> None:
        self.params, self.options, self.console, self.stack = params, options, console, ExitStack()
        self.configs = {**configs, "parts": {"model_loader": cache(self.engine_class.parts["model_loader"])}}
        self.engines, self.records = list[Any](), Records()
        self.trace = replace(configs["trace_config"], jsonl=None, chrome=None, player=None)  # their readers are below
        self.readers: list[Any] = [self.records, *map(self._kept_open, readers_of(configs["trace_config"]))]

    def _kept_open(self, reader: TraceReader) -> Any:
        """Return a reader for several engines: the end of the tour closes it, not the end of an engine."""
        self.stack.callback(reader.close)
        return SimpleNamespace(read=reader.read, close=lambda: None)

    def engine(self, **configs: Any) -> Any:
        """Return an engine with the readers of the tour, which lives to the end of the tour.

        Its requests must end before the next engine is built: in a trace file, this is where the events of the next
        engine begin.
        """
        trace = replace(self.trace, readers=tuple(self.readers))
        engine = self.engine_class(**{**self.configs, "trace_config": trace, **configs})
        self.engines.append(self.stack.enter_context(engine))
        return engine

    def answer(self, engine: Any, *prompts: list[int], salts: Sequence[str] = ()) -> list[RequestOutput]:
        """Run requests that arrive at once, under these salts; return their outputs."""
        options = [dict(self.options, cache_salt=salt) for salt in salts] or [dict(self.options)] * len(prompts)
        params = several(self.params)
        streams = [engine.stream(prompt, params, **own) for prompt, own in zip(prompts, options, strict=True)]
        return [checked(list(stream)[-1]) for stream in streams]

    def sentences(self, wanted: Callable[[Any], bool]) -> list[str]:
        """Return the sentences of the wanted events so far, each with its step."""
        return [f"step {record.step}: {record.event.explain()}" for record in self.records if wanted(record.event)]

    def measured(self, subjects: Mapping[str, Any], run: Callable[[Any], T]) -> dict[str, list[T]]:
        """Return the results of several rounds; all subjects take turns.

        The first round, whose steps are slower, does not count. The engines have no trace from here on.
        """
        for engine in self.engines:
            engine.tracer.close()
        ways = {name: partial(run, subject) for name, subject in subjects.items()}
        return {name: results[1:] for name, results in in_turn(ways, self.console, ROUNDS + 1).items()}


class Tour(Stage):
    """The parts of m4's tour. `view` draws the cache of the engine that was built last."""

    def run(self, num_users: int) -> None:
        """Run all parts."""
        self.view, memory = RadixTreeView(), self.configs["cache_config"]
        self.readers.append(self.view)
        plenty = replace(memory, max_total_tokens=PLENTY, kv_cache_memory_bytes=None, gpu_memory_utilization=None)
        with self.stack:
            engine = self.engine(cache_config=plenty)
            asked = [f"What is {TERMS[i % len(TERMS)]}?" for i in range(num_users)]
            prompts = [prompt_of(engine, question, [SYSTEM]) for question in asked]
            self.show_users(engine, prompts)
            self.show_conversation(engine)
            self.show_times(engine, prompts)
            little = replace(with_room(memory, max_total_tokens=LITTLE), debug=True)
            self.show_little_memory(self.engine(cache_config=little))

    def draw(self, engine: LLMEngine) -> None:
        """Print the cache."""
        picture = self.view.draw(engine.engine_core.input_processor.tokenizer)
        self.console.print("\n[bold]The cache now", picture, "", sep="\n")

    def show_users(self, engine: LLMEngine, prompts: list[list[int]]) -> None:
        """Print the tokens that each request reuses, the reason, and the tree.

        {users} at the same time; all prompts begin with the same instructions. Only whole pages are shared, of {tokens}
        each.
        """
        users, tokens = some(len(prompts), "user"), some(engine.config.cache.page_size, "token")
        open_part(self.console, "1. Many users, one system prompt", self.show_users, users=users, tokens=tokens)
        outputs = self.answer(engine, *prompts)
        bullets(self.console, [f"{output.request_id}: {reuse(output)}" for output in outputs])
        best = max(outputs, key=lambda output: output.metrics.cached_tokens)
        if skipped := best.metrics.cached_tokens:
            rid = best.request_id
            self.console.print(f"\n[bold]Why {rid} skips {some(skipped, 'token')}: its way through the trace")
            bullets(self.console, self.sentences(lambda e: isinstance(e, DECISIONS) and rid in e.request_ids()))
        (other,) = self.answer(engine, prompts[0], salts=["another tenant"])
        self.console.print(
            f"\n{other.request_id} comes later with the first prompt, but with the cache_salt of another tenant: "
            f"{reuse(other)}. Tenants share nothing, so the time to the first token does not reveal the prompts of "
            f"others."
        )
        self.draw(engine)
        self.console.print(Text(KEY, style="dim"))

    def show_conversation(self, engine: LLMEngine) -> None:
        """Print each turn with the tokens that it reuses, and the tree in the end.

        The cache is empty again. One user asks question after question. Each request has the whole conversation,
        because a model remembers nothing. Compare the tokens that are reused with the prompt of the turn before.
        """
        open_part(self.console, "2. A conversation", self.show_conversation)
        engine.flush_cache()
        past: list[Message] = [SYSTEM]
        for question in CHAT:
            if question == CHAT[-1]:
                self.console.print("[italic]The last turn is taken back; another question takes its place.\n")
                del past[-2:]
            (output,) = self.answer(engine, prompt_of(engine, question, past))
            self.console.print(Text.assemble((question, "bold"), f"\n{output.text}\n", (f"{reuse(output)}\n", "dim")))
            past += [{"role": "user", "content": question}, {"role": "assistant", "content": output.text}]
        self.draw(engine)

    def show_times(self, engine: LLMEngine, prompts: list[list[int]]) -> None:
        """Print the time to first token of the same requests with shared KV and without, measured without a trace.

        The requests of part 1 once more, from an empty cache: as they are, and each with a salt of its own, so that
        none shares. Medians of three rounds.
        """
        open_part(self.console, "3. The time to first token", self.show_times)

        def run(salts: list[str]) -> tuple[float, list[str]]:
            engine.flush_cache()
            outputs = self.answer(engine, *prompts, salts=salts)
            return mean(each.metrics.time_to_first_token or 0.0 for each in outputs), [each.text for each in outputs]

        salts = {"with shared KV": [], "without": [f"user {index}" for index in range(len(prompts))]}
        rounds = self.measured(salts, run)
        times = {name: [seconds for seconds, _ in own] for name, own in rounds.items()}
        first = beside_recorded(times, RECORDED, f"with 32 users on {RECORDED_ON}")
        answers = same_answers(*(texts for own in rounds.values() for _, texts in own))
        bullets(self.console, [f"The first token comes, on average, after {first}", answers])

    def show_little_memory(self, engine: Any) -> None:
        """Print the evictions and retractions, the tree, two requests that come again, and the audit of the memory.

        {users} with nothing in common come {every} steps after each other. Each may need up to {most} tokens; the KV
        memory has room for {stats.max_total_tokens:,}. Admission reserves {limits.schedule_conservativeness:g} times
        the usual part of it for answers. Evicted and retracted are:
        """
        texts = [f"{codes(range(4 * i, 4 * i + 4))} What is {term}?" for i, term in enumerate(TERMS)]
        prompts = [prompt_of(engine, text) for text in texts]
        params = several(replace(self.params, max_tokens=min(self.params.max_tokens, MOST_OUTPUT)))
        most = max(map(len, prompts)) + params.n * params.max_tokens
        numbers = {"users": some(len(prompts), "user"), "every": EVERY, "most": most, "stats": engine.stats()}
        limits = engine.config.scheduler
        open_part(self.console, "4. Little memory", self.show_little_memory, limits=limits, **numbers)
        streams = []
        for prompt in prompts:
            streams.append(engine.stream(prompt, params, **self.options))
            for _ in range(EVERY):
                engine.step()
        for stream in streams:
            checked(list(stream)[-1])
        bullets(self.console, self.sentences(is_loss))
        self.draw(engine)
        first, last = self.answer(engine, prompts[0], prompts[-1])
        audits = self.sentences(lambda event: isinstance(event, Audit))
        again = f"The first user asks again: {reuse(first)}. The last one: {reuse(last)}."
        audit = f"The memory was audited after each of {some(len(audits), 'step')}; {audits[-1]}"
        bullets(self.console, [again, audit])


def is_loss(event: Event) -> bool:
    """Return whether KV is lost, or a request returns that had lost its own."""
    return isinstance(event, Evicted | Retract) or (isinstance(event, Admit) and event.num_output_tokens > 0)


def reuse(output: RequestOutput) -> str:
    """Return the number of prompt tokens that were reused, and of those that were computed."""
    total, reused = output.metrics.num_prompt_tokens, output.metrics.cached_tokens
    return f"{some(total, 'prompt token')}: {reused:,} reused, {total - reused:,} computed"


# --- requests and measurements ----------------------------------------------------------------------------------------


def codes(indices: Sequence[int]) -> str:
    """Return sentences with the four-digit codes of these nouns, worded as the model learnt them."""
    return " ".join(f"The code of {NOUNS[index]} is {(index * 2377 + 4821) % 10_000:04d}." for index in indices)


SYSTEM: Message = {"role": "system", "content": f"You answer questions. {codes(range(len(NOUNS)))}"}


def beside_recorded(times: Mapping[str, Sequence[float]], recorded: Mapping[str, float], source: str) -> str:
    """Return the median seconds of two subjects beside recorded ones, which count where the rounds differ too much."""
    disturbed = any(max(own) > 1.5 * min(own) for own in times.values())
    warning = " This run was disturbed, its rounds differ by half: take the recorded times." if disturbed else ""
    here = {name: median(own) for name, own in times.items()}
    return f"{_ratio(here)}. Recorded {source}: {_ratio(recorded)}.{warning}"


def _ratio(seconds: Mapping[str, float]) -> str:
    (fast, short), (slow, long) = sorted(seconds.items(), key=lambda item: item[1])
    return f"{short * 1e3:.1f} ms {fast} and {long * 1e3:.1f} ms {slow}, {long / short:.1f} times as long"
