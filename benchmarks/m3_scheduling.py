"""What the scheduler itself costs: a decode step of many requests, decided and committed, without any model.

Every request gets a token in every step and the next block in every sixteenth, as in an engine; nobody listens to the
trace, and no text is made, since nobody reads one.
"""

import statistics
import time
from typing import Any

import torch
from transformers import AutoTokenizer

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import Sequence
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention import DEFAULT_MODEL, SamplingParams, SchedulerConfig
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler import Scheduler

NUM_SEQUENCES = 256
PROMPT_LENS = range(10, 50)
EOS, TOKEN = 0, 7


def make_scheduler(num_sequences: int, num_steps: int) -> Scheduler:
    """A scheduler with so many requests, none of which ends within `num_steps`."""
    tracer = Tracer()
    spec = KVCacheSpec(block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    length = PROMPT_LENS.stop + num_steps + 2
    scheduler = Scheduler(
        scheduler_config=SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=num_sequences * length),
        kv_manager=KVCacheManager(
            kv_cache_config=KVCacheConfig(spec=spec, num_blocks=num_sequences * (spec.blocks_for(length) + 1)),
            tracer=tracer,
        ),
        preemption=FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids=frozenset({EOS}), max_model_len=length + 1),
        tracer=tracer,
    )
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    for number in range(num_sequences):
        request_id, params = f"req-{number}", SamplingParams(max_tokens=num_steps + 1)
        prompt = [TOKEN] * PROMPT_LENS[number % len(PROMPT_LENS)]
        sequence = Sequence(request_id, prompt, params, IncrementalDetokenizer(tokenizer))
        scheduler.add_request(Request(request_id, None, sequence, seed=number, arrival_time=0.0))
    return scheduler


def scheduling(*, num_steps: int, num_sequences: int = NUM_SEQUENCES) -> dict[str, Any]:
    """Medians over the decode steps, in seconds per sequence."""
    scheduler = make_scheduler(num_sequences, num_steps)
    decided, committed = [], []
    for _ in range(num_steps):
        begin = time.perf_counter()
        decision = scheduler.schedule()
        decided.append(time.perf_counter() - begin)
        ids = list(decision.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, [[TOKEN] for _ in ids], [[None]] * len(ids))
        begin = time.perf_counter()
        scheduler.update_from_output(decision, output)
        committed.append(time.perf_counter() - begin)
    decodes = slice(1, None)  # the first step has the prompts
    both = [a + b for a, b in zip(decided[decodes], committed[decodes], strict=True)]
    return {
        "sequences": num_sequences,
        "steps": len(both),
        "schedule": statistics.median(decided[decodes]) / num_sequences,
        "update": statistics.median(committed[decodes]) / num_sequences,
        "both": statistics.median(both) / num_sequences,
        "both_us": statistics.median(both) / num_sequences * 1e6,
        "both_mean": statistics.mean(both) / num_sequences,
    }
