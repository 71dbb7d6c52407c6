"""m2 and m3 on the same requests: the memory that they reserve, the part of it with tokens, and their speed.

Part of `python -m m3_paged_attention.demo`. m2 runs twice: with as many slots as m3 has requests in flight, and with as
many as m3's memory has room for. The second is more than fair to it: its slots are cut to the longest request of the
workload, which is not known beforehand.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rich.table import Table

from m1_single_request.config import ModelConfig as FileModelConfig
from m1_single_request.errors import ConfigError, EngineError
from m1_single_request.events import size, some
from m1_single_request.llm_engine import LLMEngine as AnyEngine
from m1_single_request.outputs import RequestOutput
from m2_continuous_batching import LLMEngine as SlotEngine, SchedulerConfig as SlotSchedulerConfig
from m2_continuous_batching.demo_static_batching import Workload
from m3_paged_attention.llm_engine import LLMEngine

WIDE, TIGHT, PAGED = "m2, as many", "m2, same bytes", "m3"


@dataclass(frozen=True)
class Contender:
    """An engine, and the units of its KV memory."""

    engine: AnyEngine
    noun: str
    num_pieces: int
    piece_tokens: int
    piece_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole KV memory, used or not."""
        return self.num_pieces * self.piece_bytes

    def reserved(self, stats: Any) -> int:
        """Return the bytes reserved for running requests: their blocks, or a slot for each."""
        return int(stats.kv_bytes_reserved if self.noun == "block" else stats.num_running * self.piece_bytes)


@dataclass(frozen=True)
class Contest:
    """The engines by name, and the reasons why others are missing."""

    contenders: dict[str, Contender]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One run of a workload. The lists have an entry for the end of each step."""

    seconds: float
    num_steps: int
    num_preemptions: int
    running: list[int]
    reserved: list[int]
    """Bytes of KV memory reserved for the running requests."""
    used: list[int]
    """Bytes of KV memory with tokens."""
    token_ids: list[tuple[int, ...]]
    """Outputs, in the order of the workload."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def waste(self) -> float:
        """Share of the reserved bytes without tokens, over all steps."""
        return 1 - sum(self.used) / max(1, sum(self.reserved))


@contextmanager
def contest(engine: LLMEngine, workload: Workload) -> Iterator[Contest]:
    """Yield m3's engine, and m2's engines on the same model while the context lasts.

    Those of m2 that cannot be are noted, with the reason.
    """
    core, model = engine.engine_core, engine.config.model
    pool, per_token = core.scheduler.kv_manager, core.executor.kv_cache_spec(1).bytes_per_token
    m3 = Contender(engine, "block", pool.num_blocks + 1, pool.block_size, pool.block_size * per_token)  # with block 0
    if model.load_format == "dummy":
        yield Contest({PAGED: m3}, ["m2 needs the files of a model: with random weights only m3 runs."])
        return
    most_tokens = core.input_processor.max_model_len
    lengths = [len(p) + own.max_tokens for p, own in zip(workload.prompts, workload.params, strict=True)]
    longest = min(max(lengths), most_tokens)
    num_running = max(run(m3, workload).running)  # this run also warms m3 up
    wanted = {WIDE: (num_running, most_tokens), TIGHT: (m3.num_bytes // (longest * per_token), longest)}
    load, found, notes = cache(SlotEngine.parts["model_loader"]), {}, []
    config = FileModelConfig(**{f: getattr(model, f) for f in ("model", "device", "dtype", "max_model_len", "seed")})
    with ExitStack() as stack:
        for name, (num_slots, slot_tokens) in wanted.items():

            def load_cut(config: FileModelConfig, slot_tokens: int = slot_tokens) -> Any:
                return replace(load(config), max_model_len=slot_tokens)

            try:
                m2 = SlotEngine(
                    model_config=config,
                    scheduler_config=SlotSchedulerConfig(max_num_seqs=num_slots),
                    parts={"model_loader": load_cut},
                )
            except ConfigError as error:
                notes.append(f"{name} is left out: {error}.")
                continue
            stack.enter_context(m2)
            found[name] = Contender(m2, "slot", num_slots, slot_tokens, slot_tokens * per_token)
        yield Contest(found | {PAGED: m3}, notes)


def run(contender: Contender, workload: Workload) -> Run:
    """Submit all requests and step until they have ended; record the memory after every step."""
    engine, outputs = contender.engine, dict[str, RequestOutput]()
    looks: list[tuple[int, int, int]] = []
    before, begin = engine.stats(), time.perf_counter()
    request_ids = [engine.add_request(p, own) for p, own in zip(workload.prompts, workload.params, strict=True)]
    while engine.has_unfinished_requests():
        outputs |= engine.step()
        stats = engine.stats()
        if stats.num_running:  # after the last step there is nothing to see
            looks.append((stats.num_running, contender.reserved(stats), stats.kv_bytes))
    seconds, after = time.perf_counter() - begin, engine.stats()
    for output in outputs.values():
        if output.error is not None:
            raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    running, reserved, used = map(list, zip(*looks or [(1, 0, 0)], strict=True))
    return Run(
        seconds=seconds,
        num_steps=after.num_steps - before.num_steps,
        num_preemptions=getattr(after, "num_preemptions", 0) - getattr(before, "num_preemptions", 0),
        running=running,
        reserved=reserved,
        used=used,
        token_ids=[outputs[request_id].token_ids for request_id in request_ids],
    )


def compare(contest: Contest, workload: Workload, *, rounds: int = 2) -> dict[str, Run]:
    """Return each engine's fastest run of several, by name."""
    measured: dict[str, list[Run]] = {name: [] for name in contest.contenders}
    for contender in contest.contenders.values():  # the first steps of an engine are slower
        run(contender, Workload(workload.prompts[:1], workload.params[:1]))
    for _ in range(rounds):  # in turn, so that a slow moment of the machine meets all of them
        for name, contender in contest.contenders.items():
            measured[name].append(run(contender, workload))
    return {name: min(runs, key=lambda run: run.seconds) for name, runs in measured.items()}


def comparison_table(contest: Contest, measured: dict[str, Run]) -> Table:
    """Return a table of all numbers, a column for each engine, with the workload in the caption."""
    table = Table(caption=CAPTION if len(measured) > 1 else None, caption_justify="left")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    memory: list[tuple[str, Callable[[Contender], str]]] = [
        ("KV memory", lambda one: some(one.num_pieces, one.noun)),
        ("  each of", lambda one: some(one.piece_tokens, "token")),
        ("  together", lambda one: size(one.num_bytes)),
    ]
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("reserved, at most", lambda run: size(max(run.reserved))),
        ("  on average", lambda run: size(round(mean(run.reserved)))),
        ("used, at most", lambda run: size(max(run.used))),
        ("  on average", lambda run: size(round(mean(run.used)))),
        ("reserved for nothing", lambda run: f"{run.waste:.1%}"),
        ("in flight, at most", lambda run: some(max(run.running), "request")),
        ("  on average", lambda run: f"{mean(run.running):.1f}"),
        ("preemptions", lambda run: str(run.num_preemptions)),
        ("output tokens", lambda run: f"{run.num_tokens:,}"),
        ("steps", lambda run: f"{run.num_steps:,}"),
        ("wall time", lambda run: f"{run.seconds:.2f} s"),
        ("tokens per second", lambda run: f"{run.tokens_per_second:,.0f}"),
    ]
    for label, of_memory in memory:
        table.add_row(label, *(of_memory(contest.contenders[name]) for name in measured))
    for label, of_run in rows:
        table.add_row(label, *map(of_run, measured.values()))
    return table


CAPTION = (
    "m2, as many: as many slots as m3 has requests in flight at most, each as long as the longest request may become.\n"
    "m2, same bytes: as many slots as fit into m3's memory, each only as long as the longest request here can become. "
    "Nobody knows that length beforehand.\n"
    "reserved: for the requests that run, so that nobody else can have it. used: the part of it that holds keys and "
    "values. Both were looked at after each step. Times are the faster of two runs."
)


def what_it_shows(measured: dict[str, Run]) -> list[str]:
    """Return the differences, in one or two sentences each."""
    m3, said = measured[PAGED], []
    if WIDE in measured:
        said.append(
            f"For {some(max(measured[WIDE].running), 'request')} in flight m2 reserves "
            f"{size(max(measured[WIDE].reserved))}, m3 for {max(m3.running)} never more than {size(max(m3.reserved))}."
        )
    if TIGHT in measured:
        tight = measured[TIGHT]
        said.append(
            f"On the same bytes m2 has {mean(tight.running):.1f} requests in flight on average, m3 "
            f"{mean(m3.running):.1f}; m2 takes {tight.num_steps / m3.num_steps:.2f} times as many steps."
            if tight.num_steps != m3.num_steps
            else "On the same bytes both take the same steps: nobody had to wait. Try more requests (--num-prompts)."
        )
    if len(measured) == 1:
        return said
    answers = list(zip(*(run.token_ids for run in measured.values()), strict=True))
    differing = sum(len(set(same)) > 1 for same in answers)
    said.append(
        f"{differing} of {some(len(answers), 'answer')} are not the same in each column: other sums round differently."
        if differing
        else f"The answers are the same in each column, token for token, all {len(answers)} of them."
    )
    said.append(
        "The speed is that of a very small model on this machine at this moment, and any other program changes it. "
        "Blocks are not the only difference in it, either: m2 runs the network of transformers, m3 its own."
    )
    return said


def mean(numbers: list[int]) -> float:
    """Return the average of a list that is not empty."""
    return sum(numbers) / len(numbers)
