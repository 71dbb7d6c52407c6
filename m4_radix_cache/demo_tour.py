"""Tour of the demo: many users of one system prompt, a conversation, and a memory that is too small.

Part of `python -m m4_radix_cache.demo`; no part of the engine depends on it. The model that ships explains terms of LLM
inference and restates codes from its prompt, so a wrong page in the cache would show in an answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.demo_tour import bullets, checked, headline
from m1_single_request.events import some
from m1_single_request.input_processor import Message
from m1_single_request.llm_engine import LLMEngine as AnyEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import TraceReader, TraceRecord
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.events import Admit, Audit, Retract
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.mem_cache.events import Evicted
from m4_radix_cache.views.radix_tree import KEY, RadixTreeView

PLENTY = 8192  # tokens of KV memory: enough, and numbers that a reader can add up
LITTLE = 400  # tokens in the last part: a little less than its requests fill at most, so that one is retracted
CONSERVATIVENESS = 0.1  # admits requests for which there is no room in the end
EVERY, MOST_OUTPUT = 2, 48  # in the last part: steps between two arrivals, and tokens of an answer
ROUNDS = 3  # of a measurement
RECORDED, RECORDED_ON = {"with shared KV": 0.012, "without": 0.040}, "AMD EPYC, 1 thread"
"""Mean seconds to the first token of the requests of part 1."""
NOUNS = (
    "zebra", "otter", "lamp", "eagle", "candle", "goat", "kite", "river", "tiger", "spoon", "anchor", "bridge",
    "castle", "dragon", "forest", "garden", "hammer", "island", "jacket", "ladder", "mirror", "needle", "ocean",
    "pencil", "queen", "rocket", "saddle", "table", "velvet", "wagon",
)  # fmt: skip
TERMS = ("prefix caching", "a radix tree", "LRU", "continuous batching", "paged attention", "cache eviction")
CHAT = ("What is prefix caching?", "What is the code of lamp?", "What is LRU?", "What is the code of zebra?")
"""Turns of the conversation; the last takes the place of the one before it."""
INSTRUCTIONS = "You answer questions about LLM inference. Requests that begin with the same tokens share their KV."
OTHER_TENANT = "another tenant"
CONVERSATION = (
    "The cache is empty again. One user asks question after question. Each request has the whole conversation, because "
    "a model remembers nothing; its beginning is reused, with the answers, and only the end is computed."
)

S, T = TypeVar("S"), TypeVar("T")


class Records(list[TraceRecord]):
    """All records of a trace."""

    def read(self, record: TraceRecord) -> None:
        """Append the record."""
        self.append(record)

    def close(self) -> None:
        """Do nothing: the records are read after the run."""


@dataclass(frozen=True)
class Stage:
    """An engine with its trace and its view, and the settings of its requests."""

    engine: LLMEngine
    records: Records
    view: RadixTreeView
    params: SamplingParams
    options: Mapping[str, Any]
    console: Console

    def run(self, *prompts: list[int], **changes: Any) -> list[RequestOutput]:
        """Run requests that arrive at once. `changes`: of their options."""
        return run_together(self.engine, prompts, [self.params] * len(prompts), {**self.options, **changes})

    def draw(self) -> None:
        """Print the cache."""
        self.console.print("\n[bold]The cache now")
        self.console.print(self.view.draw(self.engine.engine_core.input_processor.tokenizer))


def tour(
    configs: Mapping[str, Any], params: SamplingParams, options: Mapping[str, Any], console: Console, num_users: int
) -> None:
    """Run all parts on two engines. The model is loaded once."""
    memory, parts = configs["cache_config"], {"model_loader": cache(LLMEngine.parts["model_loader"])}
    plenty = replace(memory, max_total_tokens=PLENTY, kv_cache_memory_bytes=None, gpu_memory_utilization=None)
    with ExitStack() as stack:
        readers = [stack.enter_context(kept_open(reader)) for reader in readers_of(configs["trace_config"])]

        def stage(cache_config: CacheConfig) -> Stage:
            records, view = Records(), RadixTreeView()
            own = {"cache_config": cache_config, "trace_config": TraceConfig(readers=(*readers, records, view))}
            engine = stack.enter_context(LLMEngine(**{**configs, **own}, parts=parts))
            return Stage(engine, records, view, params, options, console)

        roomy, scarce = stage(plenty), stage(replace(sized(memory, LITTLE), debug=True))
        prompts = show_users(roomy, num_users)
        show_conversation(roomy)
        show_times(roomy, prompts)
        show_little_memory(scarce)


def show_users(stage: Stage, num_users: int) -> list[list[int]]:
    """Print the tokens that each request reuses, the reason, and the tree. Return the prompts."""
    console, page_size = stage.console, stage.engine.config.cache.page_size
    questions = [f"What is {TERMS[i % len(TERMS)]}?" for i in range(num_users)]
    prompts = [as_tokens(stage.engine, [SYSTEM, _user(question)]) for question in questions]
    headline(
        console,
        "1. Many users, one system prompt",
        f"{some(num_users, 'user')} at the same time, whose prompts begin with the same instructions. Only whole pages "
        f"are shared, of {some(page_size, 'token')} each.",
    )
    outputs, table = stage.run(*prompts), Table("", "question", "prompt", "reused", "computed", box=None)
    for question, output in zip(questions, outputs, strict=True):
        total, reused = output.metrics.num_prompt_tokens, output.metrics.cached_tokens
        table.add_row(output.request_id, Text(question), f"{total:,}", f"{reused:,}", f"{total - reused:,}")
    console.print(table)
    best = max(outputs, key=lambda output: output.metrics.cached_tokens)
    skips = some(best.metrics.cached_tokens, "token")
    console.print(f"\n[bold]Why {best.request_id} skips {skips}: its way through the trace")
    bullets(console, way(stage.records, best.request_id))
    (other,) = stage.run(prompts[0], cache_salt=OTHER_TENANT)
    console.print(
        f"\n{other.request_id} comes later with the prompt of {outputs[0].request_id}, but with cache_salt="
        f"{OTHER_TENANT!r}, and finds {some(other.metrics.cached_tokens, 'token')}. Tenants with different salts share "
        f"nothing, so that no fast answer betrays what others have asked."
    )
    stage.draw()
    console.print(Text(f"{KEY}\n", style="dim"))
    return prompts


def way(records: Records, rid: str) -> Iterator[str]:
    """Yield the decisions about a request, until it is admitted."""
    for record in records:
        if rid in record.event.request_ids():
            yield f"step {record.step}: {record.event.explain()}"
            if isinstance(record.event, Admit):
                return


def show_conversation(stage: Stage) -> None:
    """Print each turn with the tokens that it reuses, and the tree in the end."""
    stage.engine.flush_cache()
    headline(stage.console, "2. A conversation", CONVERSATION)
    past = [SYSTEM]
    for question in CHAT:
        if question == CHAT[-1]:
            stage.console.print("[italic]The last turn is taken back; another question takes its place.\n")
            del past[-2:]
        (output,) = stage.run(as_tokens(stage.engine, [*past, _user(question)]))
        stage.console.print(Text.assemble((question, "bold"), f"\n{output.text}\n", (f"{reuse(output)}\n", "dim")))
        past += [_user(question), {"role": "assistant", "content": output.text}]
    stage.draw()


def reuse(output: RequestOutput) -> str:
    """Return the number of prompt tokens that were reused, and of those that were computed."""
    total, reused = output.metrics.num_prompt_tokens, output.metrics.cached_tokens
    return f"{some(total, 'prompt token')}: {reused:,} reused, {total - reused:,} computed"


def show_times(stage: Stage, prompts: Sequence[list[int]]) -> None:
    """Print the time to first token of the same requests with shared KV and without, measured without a trace."""
    engine, console = stage.engine, stage.console
    headline(
        console,
        "\n3. The time to first token",
        f"The {some(len(prompts), 'request')} of part 1 once more, {ROUNDS} times from an empty cache: as they are, and "
        f"each with a salt of its own, so that none shares.",
    )
    engine.tracer.close()

    def run(is_shared: bool) -> list[RequestOutput]:
        engine.flush_cache()
        salts = [{} if is_shared else {"cache_salt": f"user {i}"} for i in range(len(prompts))]
        streams = [
            engine.stream(p, stage.params, **{**stage.options, **salt}) for p, salt in zip(prompts, salts, strict=True)
        ]
        return [checked(list(stream)[-1]) for stream in streams]

    with console.status("measuring", refresh_per_second=2):
        rounds = take_turns(dict(zip(RECORDED, (True, False), strict=True)), run)
    waits = {
        name: [mean(output.metrics.time_to_first_token or 0.0 for output in outputs) for outputs in own]
        for name, own in rounds.items()
    }
    answers = zip(*(own[-1] for own in rounds.values()), strict=True)
    same = sum(shared.outputs == alone.outputs for shared, alone in answers)
    bullets(
        console,
        [
            f"The first token comes, on average, after {compared(waits, RECORDED)}",
            f"{same} of {some(len(prompts), 'answer')} are the same with shared KV and without, token for token.\n",
        ],
    )


def show_little_memory(stage: Stage) -> None:
    """Print the evictions and retractions, the tree, two requests that come again, and the last audit of the memory."""
    engine, console = stage.engine, stage.console
    params = replace(stage.params, max_tokens=min(stage.params.max_tokens, MOST_OUTPUT))
    texts = [f"{codes(range(4 * i, 4 * i + 4))} What is {term}?" for i, term in enumerate(TERMS)]
    prompts = [as_tokens(engine, [_user(text)]) for text in texts]
    needed, room = sum(len(prompt) + params.max_tokens for prompt in prompts), engine.stats().max_total_tokens
    headline(
        console,
        "4. Little memory",
        f"{len(prompts)} users with nothing in common come {EVERY} steps after each other. Prompts and answers have up "
        f"to {needed:,} tokens, the KV memory {room:,}. Admission reserves "
        f"{engine.config.scheduler.schedule_conservativeness:g} times the usual room for answers. What is lost:",
    )
    streams = []
    for prompt in prompts:
        streams.append(engine.stream(prompt, params, **stage.options))
        for _ in range(EVERY):
            engine.step()
    for stream in streams:
        checked(list(stream)[-1])
    bullets(console, losses(stage.records))
    stage.draw()
    stats, short = engine.stats(), [replace(params, max_tokens=1)] * 2
    first, last = run_together(engine, [prompts[0], prompts[-1]], short, stage.options)
    *_, audit = (record.event for record in stage.records if isinstance(record.event, Audit))
    bullets(
        console,
        [
            f"\nIn all {some(stats.num_evicted_tokens, 'cached token')} evicted, {some(stats.num_retractions, 'retraction')}.",
            f"The first user asks again, {reuse(first)}; then the last one, {reuse(last)}.",
            f"The memory is audited after each step. The last time: {audit.explain()}",
        ],
    )


def losses(records: Records) -> Iterator[str]:
    """Yield the evictions, the retractions, and the returns of retracted requests."""
    for record in records:
        event = record.event
        if isinstance(event, Evicted | Retract) or (isinstance(event, Admit) and event.num_output_tokens):
            yield f"step {record.step}: {event.explain()}"


# --- requests and measurements ----------------------------------------------------------------------------------------


def code_of(index: int) -> str:
    """Return the four digits that belong to a noun."""
    return f"{(index * 2377 + 4821) % 10_000:04d}"


def codes(indices: Sequence[int]) -> str:
    """Return sentences with the codes of these nouns, worded as the model learnt them."""
    return " ".join(f"The code of {NOUNS[index]} is {code_of(index)}." for index in indices)


SYSTEM: Message = {"role": "system", "content": f"{INSTRUCTIONS} {codes(range(len(NOUNS)))}"}


def as_tokens(engine: AnyEngine, messages: Sequence[Message]) -> list[int]:
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


def run_together(
    engine: AnyEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], options: Mapping[str, Any]
) -> list[RequestOutput]:
    """Run requests that arrive at once; return their outputs, in order. Raises `EngineError` if one fails."""
    streams = [engine.stream(prompt, own, **options) for prompt, own in zip(prompts, params, strict=True)]
    return [checked(list(stream)[-1]) for stream in streams]


def take_turns(subjects: Mapping[str, S], run: Callable[[S], T]) -> dict[str, list[T]]:
    """Return the results of several rounds; in each, all subjects run, so that a slow moment meets all of them.

    The first round, whose steps are slower, does not count.
    """
    rounds = [{name: run(subject) for name, subject in subjects.items()} for _ in range(ROUNDS + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in subjects}


def compared(times: Mapping[str, Sequence[float]], recorded: Mapping[str, float]) -> str:
    """Return the median seconds of two subjects beside recorded ones, which count where the rounds differ too much."""
    here = {name: median(own) for name, own in times.items()}
    disturbed = any(max(own) > 1.5 * min(own) for own in times.values())
    warning = " This run was disturbed, its rounds differ by half: take the recorded times." if disturbed else ""
    return f"{_ratio(here)}. Recorded without flags on {RECORDED_ON}: {_ratio(recorded)}.{warning}"


def _ratio(seconds: Mapping[str, float]) -> str:
    short, long = seconds.values()
    each = " and ".join(f"{own * 1e3:.1f} ms {name}" for name, own in seconds.items())
    return f"{each}, {long / short:.1f} times as long"


@contextmanager
def kept_open(reader: TraceReader) -> Iterator[Any]:
    """Yield a reader for several engines: the end of the context closes it, not the end of an engine."""
    try:
        yield SimpleNamespace(read=reader.read, close=lambda: None)
    finally:
        reader.close()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
