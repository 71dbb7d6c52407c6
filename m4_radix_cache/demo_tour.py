"""Tour of the demo: many users of one system prompt, a conversation, and a memory that is too small.

Part of `python -m m4_radix_cache.demo`; no part of the engine depends on it. The model that ships explains terms of LLM
inference and restates codes from its prompt, so a wrong page in the cache would show in an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, headline
from m1_single_request.events import Event, RequestAdded, some
from m1_single_request.input_processor import Message
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import TraceReader, TraceRecord
from m4_radix_cache import CacheConfig, LLMEngine, RequestOutput, SamplingParams, TraceConfig
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
    "zebra", "otter", "lamp", "eagle", "candle", "goat", "kite", "river", "tiger", "spoon", "anchor", "bridge",
    "castle", "dragon", "forest", "garden", "hammer", "island", "jacket", "ladder", "mirror", "needle", "ocean",
    "pencil", "queen", "rocket", "saddle", "table", "velvet", "wagon", "acorn", "basket", "camel", "donkey", "engine",
    "feather", "guitar", "helmet", "igloo", "jungle", "kettle", "lemon", "magnet", "noodle",
)  # fmt: skip
TERMS = ("prefix caching", "a radix tree", "LRU", "continuous batching", "paged attention", "cache eviction")
CHAT = ("What is prefix caching?", "What is the code of lamp?", "What is LRU?", "What is the code of zebra?")
"""Turns of the conversation; the last takes the place of the one before it."""
CONVERSATION = (
    "The cache is empty again. One user asks question after question. Each request has the whole conversation, because "
    "a model remembers nothing. Compare the tokens that are reused with the prompt of the turn before."
)
TIMES = (
    "The requests of part 1 once more, from an empty cache: as they are, and each with a salt of its own, so that none "
    "shares. Medians of three rounds."
)
DECISIONS = (RequestAdded, PolicyOrder, Matched, Admit)

S = TypeVar("S")
T = TypeVar("T")


class Records(list[TraceRecord]):
    """All records of a trace."""

    def read(self, record: TraceRecord) -> None:
        """Append the record."""
        self.append(record)

    def close(self) -> None:
        """Do nothing: the records are read after the run."""

    def told(self, wanted: Callable[[Any], bool]) -> list[str]:
        """Return the sentences of the wanted events, each with its step."""
        return [f"step {record.step}: {record.event.explain()}" for record in self if wanted(record.event)]


class Stage:
    """Builds the engines of a tour, which share the readers of the trace, and runs its requests with equal options."""

    engine_class: ClassVar[Any] = LLMEngine

    def __init__(
        self, configs: Mapping[str, Any], params: SamplingParams, options: Mapping[str, Any], console: Console
    ) -> None:
        self.params, self.options, self.console, self.stack = several(params, params.n), options, console, ExitStack()
        self.configs = {**configs, "parts": {"model_loader": cache(self.engine_class.parts["model_loader"])}}
        self.readers = [self._kept_open(reader) for reader in readers_of(configs["trace_config"])]

    def _kept_open(self, reader: TraceReader) -> Any:
        """Return a reader for several engines: the end of the tour closes it, not the end of an engine."""
        self.stack.callback(reader.close)
        return SimpleNamespace(read=reader.read, close=lambda: None)

    def engine(self, *readers: TraceReader, **configs: Any) -> Any:
        """Return an engine with these readers, which lives to the end of the tour."""
        trace = TraceConfig(readers=readers)
        return self.stack.enter_context(self.engine_class(**{**self.configs, "trace_config": trace, **configs}))

    def answer(self, engine: Any, *prompts: list[int], salts: Sequence[str] = ()) -> list[RequestOutput]:
        """Run requests that arrive at once, under these salts; return their outputs."""
        options = [dict(self.options, cache_salt=salt) for salt in salts] or [dict(self.options)] * len(prompts)
        streams = [engine.stream(prompt, self.params, **own) for prompt, own in zip(prompts, options, strict=True)]
        return [checked(list(stream)[-1]) for stream in streams]


class Tour(Stage):
    """The parts of m4's tour. `scene` begins those on an engine of their own."""

    def run(self, num_users: int) -> None:
        """Run all parts."""
        memory = self.configs["cache_config"]
        plenty = replace(memory, max_total_tokens=PLENTY, kv_cache_memory_bytes=None, gpu_memory_utilization=None)
        with self.stack:
            self.scene(plenty)
            prompts = [self.prompt(f"What is {TERMS[i % len(TERMS)]}?") for i in range(num_users)]
            self.show_users(prompts)
            self.show_conversation()
            self.show_times(prompts)
            self.scene(replace(sized(memory, LITTLE), debug=True))
            self.show_little_memory()

    def scene(self, memory: CacheConfig) -> None:
        """Build the engine of the next parts, with a trace and a view of its own."""
        self.records, self.view = Records(), RadixTreeView()
        self.llm = self.engine(*self.readers, self.records, self.view, cache_config=memory)

    def prompt(self, question: str, past: Sequence[Message] = ()) -> list[int]:
        """Return a prompt with the codes, a conversation so far, and a question."""
        return as_tokens(self.llm, [SYSTEM, *past, {"role": "user", "content": question}])

    def draw(self) -> None:
        """Print the cache."""
        self.console.print("[bold]The cache now")
        self.console.print(self.view.draw(self.llm.engine_core.input_processor.tokenizer))

    def show_users(self, prompts: list[list[int]]) -> None:
        """Print the tokens that each request reuses, the reason, and the tree."""
        intro = (
            f"{some(len(prompts), 'user')} at the same time; all prompts begin with the same instructions. Only whole "
            f"pages are shared, of {some(self.llm.config.cache.page_size, 'token')} each."
        )
        headline(self.console, "1. Many users, one system prompt", intro)
        outputs = self.answer(self.llm, *prompts)
        bullets(self.console, [f"{output.request_id}: {reuse(output)}" for output in outputs])
        best = max(outputs, key=lambda output: output.metrics.cached_tokens)
        rid, skipped = best.request_id, some(best.metrics.cached_tokens, "token")
        self.console.print(f"\n[bold]Why {rid} skips {skipped}: its way through the trace")
        bullets(self.console, self.records.told(lambda e: isinstance(e, DECISIONS) and rid in e.request_ids()))
        (other,) = self.answer(self.llm, prompts[0], salts=["another tenant"])
        self.console.print(
            f"\n{other.request_id} comes later with the first prompt, but with the cache_salt of another tenant: "
            f"{reuse(other)}. Tenants share nothing, so that no fast answer betrays what others have asked.\n"
        )
        self.draw()
        self.console.print(Text(f"\n{KEY}", style="dim"))

    def show_conversation(self) -> None:
        """Print each turn with the tokens that it reuses, and the tree in the end."""
        headline(self.console, "2. A conversation", CONVERSATION)
        self.llm.flush_cache()
        past: list[Message] = []
        for question in CHAT:
            if question == CHAT[-1]:
                self.console.print("[italic]The last turn is taken back; another question takes its place.\n")
                del past[-2:]
            (output,) = self.answer(self.llm, self.prompt(question, past))
            self.console.print(Text.assemble((question, "bold"), f"\n{output.text}\n", (f"{reuse(output)}\n", "dim")))
            past += [{"role": "user", "content": question}, {"role": "assistant", "content": output.text}]
        self.draw()

    def show_times(self, prompts: list[list[int]]) -> None:
        """Print the time to first token of the same requests with shared KV and without, measured without a trace."""
        headline(self.console, "3. The time to first token", TIMES)
        self.llm.tracer.close()

        def run(salts: list[str]) -> tuple[float, list[str]]:
            self.llm.flush_cache()
            outputs = self.answer(self.llm, *prompts, salts=salts)
            return mean(each.metrics.time_to_first_token or 0.0 for each in outputs), [each.text for each in outputs]

        alone = [f"user {index}" for index in range(len(prompts))]
        with self.console.status("measuring", refresh_per_second=2):
            rounds = take_turns(dict(zip(RECORDED, ([], alone), strict=True)), run)
        times = {name: [seconds for seconds, _ in own] for name, own in rounds.items()}
        is_same = len({tuple(texts) for own in rounds.values() for _, texts in own}) == 1
        answers = f"The answers {'are the same' if is_same else 'differ'} with shared KV and without."
        bullets(
            self.console,
            [
                f"The first token comes, on average, after {compared(times, RECORDED, 'with 32 users', RECORDED_ON)}",
                answers,
            ],
        )

    def show_little_memory(self) -> None:
        """Print the evictions and retractions, the tree, two requests that come again, and the audit of the memory."""
        texts = [f"{codes(range(4 * i, 4 * i + 4))} What is {term}?" for i, term in enumerate(TERMS)]
        prompts = [as_tokens(self.llm, [{"role": "user", "content": text}]) for text in texts]
        params = replace(self.params, max_tokens=min(self.params.max_tokens, MOST_OUTPUT))
        room, reserved = self.llm.stats().max_total_tokens, self.llm.config.scheduler.schedule_conservativeness
        intro = (
            f"{len(prompts)} users with nothing in common come {EVERY} steps after each other. Each may need up to "
            f"{max(map(len, prompts)) + params.max_tokens} tokens; the KV memory has room for {room:,}. Admission "
            f"reserves {reserved:g} times the usual part of it for answers. Evicted and retracted are:"
        )
        headline(self.console, "4. Little memory", intro)
        streams = []
        for prompt in prompts:
            streams.append(self.llm.stream(prompt, params, **self.options))
            for _ in range(EVERY):
                self.llm.step()
        for stream in streams:
            checked(list(stream)[-1])
        bullets(self.console, self.records.told(is_loss))
        self.console.print()
        self.draw()
        self.console.print()
        first, last = self.answer(self.llm, prompts[0], prompts[-1])
        audits = self.records.told(lambda event: isinstance(event, Audit))
        bullets(
            self.console,
            [
                f"The first user asks again: {reuse(first)}. The last one: {reuse(last)}.",
                f"The memory was audited after each of {some(len(audits), 'step')}; {audits[-1]}",
            ],
        )


def is_loss(event: Event) -> bool:
    """Return whether KV is lost, or a request returns that had lost its own."""
    return isinstance(event, Evicted | Retract) or (isinstance(event, Admit) and event.num_output_tokens > 0)


def reuse(output: RequestOutput) -> str:
    """Return the number of prompt tokens that were reused, and of those that were computed."""
    total, reused = output.metrics.num_prompt_tokens, output.metrics.cached_tokens
    return f"{some(total, 'prompt token')}: {reused:,} reused, {total - reused:,} computed"


# --- requests and measurements ----------------------------------------------------------------------------------------


def code_of(index: int) -> str:
    """Return the four digits that belong to a noun."""
    return f"{(index * 2377 + 4821) % 10_000:04d}"


def codes(indices: Sequence[int]) -> str:
    """Return sentences with the codes of these nouns, worded as the model learnt them."""
    return " ".join(f"The code of {NOUNS[index]} is {code_of(index)}." for index in indices)


SYSTEM: Message = {"role": "system", "content": f"You answer questions. {codes(range(len(NOUNS)))}"}


def as_tokens(engine: Any, messages: Sequence[Message]) -> list[int]:
    """Return the prompt of a conversation; without a chat template, a line for each message."""
    tokenizer = engine.engine_core.input_processor.tokenizer
    if tokenizer.chat_template is not None:
        return engine.chat_prompt(messages)
    return list(tokenizer.encode("".join(f"{message['content']}\n" for message in messages)))


def several(params: SamplingParams, num_answers: int) -> SamplingParams:
    """Return parameters for so many answers: drawn ones, because greedy ones would all be the same."""
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 6}
    return replace(params, n=num_answers, **drawn if num_answers > 1 and params.is_greedy else {})


def sized(config: CacheConfig, num_tokens: int) -> CacheConfig:
    """Return `config` with room for `num_tokens`, unless it sets a size."""
    sizes = (config.max_total_tokens, config.kv_cache_memory_bytes, config.gpu_memory_utilization)
    return replace(config, max_total_tokens=num_tokens) if all(size is None for size in sizes) else config


def take_turns(subjects: Mapping[str, S], run: Callable[[S], T]) -> dict[str, list[T]]:
    """Return the results of several rounds; in each, all subjects run, so that a slow moment meets all of them.

    The first round, whose steps are slower, does not count.
    """
    rounds = [{name: run(subject) for name, subject in subjects.items()} for _ in range(ROUNDS + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in subjects}


def compared(times: Mapping[str, Sequence[float]], recorded: Mapping[str, float], workload: str, machine: str) -> str:
    """Return the median seconds of two subjects beside recorded ones, which count where the rounds differ too much."""
    here = {name: median(own) for name, own in times.items()}
    disturbed = any(max(own) > 1.5 * min(own) for own in times.values())
    warning = " This run was disturbed, its rounds differ by half: take the recorded times." if disturbed else ""
    return f"{_ratio(here)}. Recorded {workload} on {machine}: {_ratio(recorded)}.{warning}"


def _ratio(seconds: Mapping[str, float]) -> str:
    short, long = seconds.values()
    each = " and ".join(f"{own * 1e3:.1f} ms {name}" for name, own in seconds.items())
    return f"{each}, {long / short:.1f} times as long"
