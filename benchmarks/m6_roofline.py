"""What the two phases ask of a machine: steps of prefill, of decode and of both at once, under its roof.

Lesson 3 counted operations and bytes of both phases for its engine. Here the same is counted for m6's, with one thread,
as each engine of a group has: so that a step that holds a piece of a prompt *and* decodes, as one engine for everything
runs it, can be laid beside the two kinds of steps that it is made of. Random weights in the shape of Qwen3-0.6B,
bfloat16: larger than any cache, as real models are.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.m3_machine import Reader, peak_flops
from benchmarks.m3_models import random_model
from benchmarks.m3_roofline import forward_bytes, forward_flops
from benchmarks.m3_workload import Ragged, watched
from m1_single_request.events import StepDone
from m3_paged_attention.models.architecture import DecoderConfig
from m5_chunked_prefill_spec.events import Batch
from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig

DTYPE = "bfloat16"
KV_BYTES = 2 * 2**30
BUDGET = 1024
Row = dict[str, Any]
Step = tuple[Batch, float]
"""What went through the model, and the seconds that it took."""


class Measured:
    """An engine, and the steps that it takes."""

    def __init__(self, engine: LLMEngine, config: DecoderConfig, seed: int) -> None:
        self.engine, self.config, self.seed = engine, config, seed

    def steps(self, work: Callable[[], object]) -> list[Step]:
        """Every step of some work."""
        self.engine.flush_cache()
        seen = watched(self.engine, work, Batch, StepDone)
        return [(b, s.execute_ms / 1e3) for b, s in zip(seen.of(Batch), seen.of(StepDone), strict=True)]

    def prefill(self, length: int, *, repeats: int = 3) -> Row:
        """One prompt of `length` tokens."""
        work = Ragged.drawn(1, prompts=(length, length), outputs=(1, 1), seed=self.seed)
        found = [self.steps(lambda: work.run(self.engine))[0] for _ in range(repeats)]
        return self.point("prefill", length, found)

    def decode(self, batch: int, context: int, num_steps: int) -> Row:
        """Steps of `batch` requests that have about `context` tokens each."""
        length = num_steps + 1 + batch * context // BUDGET  # the first one answers until the last one is there, and on
        work = Ragged.drawn(batch, prompts=(context, context), outputs=(length, length), seed=self.seed)
        found = [step for step in self.steps(lambda: work.run(self.engine)) if is_full(step, batch)]
        return self.point("decode", batch, found)

    def both(self, batch: int, context: int, piece: int, *, repeats: int = 3) -> Row:
        """Steps of as many requests, into which prompts of `piece` tokens come."""
        work = Ragged.drawn(batch, prompts=(context, context), outputs=(1, 1), seed=self.seed)
        prompts = Ragged.drawn(repeats, prompts=(piece, piece), outputs=(1, 1), seed=self.seed + 1).prompts
        params = SamplingParams(max_tokens=batch + 3 * repeats, ignore_eos=True)

        def run() -> None:
            for prompt in work.prompts:
                self.engine.add_request(prompt, params)
            for _ in work.prompts:  # a step takes in at least one of them
                self.engine.step()
            for prompt in prompts:
                self.engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
                self.engine.step()
                self.engine.step()
            while self.engine.has_unfinished_requests():
                self.engine.step()

        found = [step for step in self.steps(run) if step[0].mode == "mixed" and step[0].num_prompt_tokens == piece]
        assert len(found) == repeats, f"{len(found)} steps of both"
        return self.point("both", piece, found) | {"decodes": batch}

    def point(self, kind: str, size: int, steps: Sequence[Step]) -> Row:
        """Medians of steps of the same kind, and what they had to do."""
        batch, _ = steps[len(steps) // 2]
        work = (batch.extend_lens, batch.prefix_lens)
        return {
            "kind": kind,
            "tokens": size,
            "seconds": statistics.median(seconds for _, seconds in steps),
            "flop": forward_flops(self.config, *work),
            "bytes": forward_bytes(self.config, DTYPE, *work),
        }


def is_full(step: Step, batch: int) -> bool:
    """Whether these requests decode, all of them."""
    return step[0].mode == "decode" and len(step[0].rids) == batch


def roofline(
    *, prefills: Sequence[int], batches: Sequence[int], mixed: tuple[int, int], context: int, seed: int
) -> Row:
    """The roof of this machine, and where steps lie below it. `mixed`: decodes and tokens of a prompt in one step."""
    read = Reader()
    read()
    peak = peak_flops(getattr(torch, DTYPE))
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(seed, Path(folder))
        with LLMEngine(
            model_config=ModelConfig(
                model=model.directory,
                device="cpu",
                dtype=DTYPE,
                max_model_len=BUDGET,
                load_format="dummy",
                seed=seed,
            ),
            cache_config=CacheConfig(kv_cache_memory_bytes=KV_BYTES),
            scheduler_config=SchedulerConfig(max_num_seqs=max(batches) + 1, max_num_batched_tokens=BUDGET),
        ) as engine:
            measured = Measured(engine, model.config, seed)
            points = [measured.prefill(length) for length in prefills]
            points += [measured.decode(batch, context, num_steps=8) for batch in batches]
            points.append(measured.both(mixed[0], context, mixed[1]))
    for point in points:
        point["intensity"] = point["flop"] / point["bytes"]
        point["flops"] = point["flop"] / point["seconds"]
        point["bandwidth"] = point["bytes"] / point["seconds"]
    flops = max([peak, *(point["flops"] for point in points)])  # our kernels may do more than torch does
    bandwidth = max([*read.bandwidths, *(point["bandwidth"] for point in points)])
    for point in points:
        point["bound"] = max(point["flop"] / flops, point["bytes"] / bandwidth)
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "ridge": flops / bandwidth,
        "context": context,
        "mixed": list(mixed),
        "points": points,
    }
