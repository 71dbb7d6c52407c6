"""What scheduling costs in a decode step of many requests, without any model: m4 beside m3.

m4's half of a step is more than m3's: `schedule` takes the slots and writes them into rows, and the batch is complete
when it leaves. m3 sends differences and its runner looks the rest up. So `prepare`, which makes the tensors of the
forward of it, is measured as well.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from benchmarks.m3_scheduling import EOS, NUM_SEQUENCES, PROMPT_LENS, TOKEN, make_scheduler as make_m3_scheduler
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import Sequence
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.input_batch import InputBatch
from m3_paged_attention.model_input import make_model_input
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache import DEFAULT_MODEL, SamplingParams, SchedulerConfig
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.prefill_adder import PrefillAdder
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools
from m4_radix_cache.schedule_policy import SchedulePolicy
from m4_radix_cache.scheduler import Scheduler

PAGE_SIZE = 16
CPU = torch.device("cpu")
Row = dict[str, Any]


class Times(NamedTuple):
    """Seconds of one step."""

    schedule: float
    prepare: float
    update: float


@dataclass
class Tables:
    """What m4 looks up to make tensors of a batch."""

    device: torch.device
    page_size: int
    req_to_token_pool: ReqToTokenPool


def repeated(number: int, length: int) -> list[int]:
    """A prompt of one token, but for its first, which is its own."""
    return [number + 1, *[TOKEN] * (length - 1)]


def make_scheduler(
    num_sequences: int,
    num_steps: int,
    *,
    made_by: Callable[..., Any] = Scheduler,
    rows_class: type[ReqToTokenPool] = ReqToTokenPool,
    prompt_of: Callable[[int, int], list[int]] = repeated,
    request_class: type[Req] = Req,
    policy_class: type[SchedulePolicy] = SchedulePolicy,
) -> Any:
    """An m4 scheduler, or what `made_by` makes of the same, with so many requests; none ends within `num_steps` tokens.

    `prompt_of` makes a prompt of a request's number and its length.
    """
    tracer = Tracer()
    length = PROMPT_LENS.stop + num_steps + 2
    rows = rows_class(size=num_sequences, max_context_len=length)
    allocator = TokenToKVPoolAllocator(size=num_sequences * (length // PAGE_SIZE + 3) * PAGE_SIZE, page_size=PAGE_SIZE)
    cache = RadixCache(
        req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, eviction_policy="lru", tracer=tracer
    )
    budget = num_sequences * length
    scheduler = made_by(
        scheduler_config=SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=budget),
        pools=Pools(rows, allocator, cache),
        policy=policy_class("fcfs", tree_cache=cache, seed=0, tracer=tracer),
        prefill_adder=PrefillAdder,
        preemption=FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids=frozenset({EOS}), max_model_len=length + 1),
        vocab_size=4096,
        device=CPU,
        tracer=tracer,
    )
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    for number in range(num_sequences):
        request_id, params = f"req-{number}", SamplingParams(max_tokens=num_steps + 1)
        prompt = prompt_of(number, PROMPT_LENS[number % len(PROMPT_LENS)])
        sequence = Sequence(request_id, prompt, params, IncrementalDetokenizer(tokenizer))
        req = request_class(request_id, None, sequence, seed=number, arrival_time=0.0)
        scheduler.add_request(req)
    return scheduler


def output_of(ids: list[str], token_ids: SequenceOf[int] = (TOKEN,)) -> ModelRunnerOutput:
    """The same for everybody."""
    return ModelRunnerOutput(ids, [list(token_ids) for _ in ids], [[None] * len(token_ids)] * len(ids))


def stepper(
    scheduler: Any, lay_out: Callable[[Any, Any], Any], tokens_of: Callable[[int], SequenceOf[int]]
) -> Callable[[], Times]:
    """Makes a step of a scheduler of a living batch whenever it is called. `tokens_of`: what everybody gets, by the
    step's number."""
    tables, numbers = Tables(CPU, PAGE_SIZE, scheduler.pools.req_to_token_pool), count()

    def step() -> Times:
        token_ids = tokens_of(next(numbers))
        begin = time.perf_counter()
        batch = scheduler.schedule()
        assert batch is not None and len(batch.reqs) == len(scheduler.requests)
        worker_batch = batch.get_model_worker_batch()
        scheduled = time.perf_counter()
        lay_out(worker_batch, tables)
        prepared = time.perf_counter()
        output = output_of(worker_batch.rids, token_ids)
        made = time.perf_counter()
        scheduler.update_from_output(batch, output)
        return Times(scheduled - begin, prepared - scheduled, time.perf_counter() - made)

    return step


def m4_stepper(num_sequences: int, num_steps: int) -> Callable[[], Times]:
    """Steps of m4."""
    return stepper(make_scheduler(num_sequences, num_steps), ForwardBatch.init_new, lambda number: (TOKEN,))


def m3_stepper(num_sequences: int, num_steps: int) -> Callable[[], Times]:
    """The same for m3."""
    scheduler = make_m3_scheduler(num_sequences, num_steps)
    blocks = (PROMPT_LENS.stop + num_steps + 2) // PAGE_SIZE + 2
    rows = InputBatch(max_num_seqs=num_sequences, max_blocks_per_seq=blocks, block_size=PAGE_SIZE)

    def step() -> Times:
        begin = time.perf_counter()
        decision = scheduler.schedule()
        scheduled = time.perf_counter()
        make_model_input(rows.update(decision), rows.block_tables, PAGE_SIZE, CPU)
        prepared = time.perf_counter()
        output = output_of(list(decision.num_scheduled_tokens))
        made = time.perf_counter()
        scheduler.update_from_output(decision, output)
        return Times(scheduled - begin, prepared - scheduled, time.perf_counter() - made)

    return step


def scheduling(*, num_steps: int, num_sequences: int = NUM_SEQUENCES) -> Row:
    """Medians over the decode steps, which the two take in turn, in seconds per sequence."""
    return compared(
        {"m3": m3_stepper(num_sequences, num_steps), "m4": m4_stepper(num_sequences, num_steps)},
        num_steps,
        num_sequences,
    )


def compared(sides: Mapping[str, Callable[[], Times]], num_steps: int, num_sequences: int = NUM_SEQUENCES) -> Row:
    """Medians over the decode steps, which the sides take in turn, in seconds per sequence."""
    steps: dict[str, list[Times]] = {name: [] for name in sides}
    for _ in range(num_steps):
        for name, step in sides.items():
            steps[name].append(step())
    return {
        "sequences": num_sequences,
        "steps": num_steps - 1,
        "sides": {name: _medians(found[1:], num_sequences) for name, found in steps.items()},  # the first has prompts
    }


def _medians(steps: list[Times], num_sequences: int) -> Row:
    of_parts = {
        name: statistics.median([getattr(times, name) for times in steps]) / num_sequences for name in Times._fields
    }
    scheduler = statistics.median([times.schedule + times.update for times in steps]) / num_sequences
    return of_parts | {
        "schedule_and_update": scheduler,
        "schedule_and_update_us": scheduler * 1e6,
        "all": statistics.median([sum(times) for times in steps]) / num_sequences,
    }
