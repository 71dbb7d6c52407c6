"""What a token costs the draft model beside the target: `python -m training.draft_cost [path]`.

Both models run in m4's engine on the CPU: one decode step and its logits, no scheduler, no sampler, a context of 200
tokens. They take turns as in an engine that guesses: a step of the target, then four of the draft. Whatever else the
machine does falls on both. It can only add to a step, and it interrupts long steps more often than short ones: so what
is compared is not the median but the first decile.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m4_radix_cache import CacheConfig, LLMEngine, ModelConfig
from m4_radix_cache.model_runner import ModelRunner
from training.evaluate import CHECKPOINT as TARGET
from training.evaluate_draft import CHECKPOINT, NUM_DRAFTS

BATCH_SIZES = (1, 8)
CONTEXT = 200  # tokens that have their KV
ROUNDS, WARM_UP = 400, 20
LARGEST_RATIO = 1 / 3


@dataclass(frozen=True)
class Cost:
    """Seconds of a decode step of either model."""

    threads: int
    batch_size: int
    target: float
    draft: float

    @property
    def ratio(self) -> float:
        return self.draft / self.target


def decode_inputs(runner: ModelRunner, batch_size: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """One new token for each of `batch_size` requests: ids, positions, and where their KV lies."""
    size = runner.page_size
    pages = CONTEXT // size + 1
    tables = np.arange(batch_size * pages, dtype=np.int32).reshape(batch_size, pages)
    slots = tables[:, -1].astype(np.int64) * size + CONTEXT % size
    metadata = AttentionMetadata.build([1] * batch_size, [CONTEXT] * batch_size, tables, slots)
    return torch.arange(batch_size), torch.full((batch_size,), CONTEXT), metadata


@torch.inference_mode()
def step_seconds(runner: ModelRunner, inputs: tuple[Tensor, Tensor, AttentionMetadata], times: int) -> float:
    """How long a decode step takes, with its logits: the mean of so many in a row."""
    input_ids, positions, metadata = inputs
    began = time.perf_counter()
    for _ in range(times):
        runner.model.compute_logits(runner.model.forward(input_ids, positions, runner.kv, metadata))
    return (time.perf_counter() - began) / times


def measure_cost(path: Path, *, threads: Sequence[int] = (), rounds: int = ROUNDS) -> list[Cost]:
    """The cost of both models' decode steps, for every batch size; with one thread and with all cores, if not told."""
    cache = CacheConfig(max_total_tokens=4096)
    models = [ModelConfig(model=str(directory), device="cpu") for directory in (TARGET, path)]
    engines = [LLMEngine(model_config=model, cache_config=cache) for model in models]
    runners = [engine.engine_core.executor.worker.model_runner for engine in engines]
    found, before = [], torch.get_num_threads()
    for number in threads or sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(number)
        for batch_size in BATCH_SIZES:
            target, draft = ((runner, decode_inputs(runner, batch_size)) for runner in runners)
            laps = [(step_seconds(*target, 1), step_seconds(*draft, NUM_DRAFTS)) for _ in range(WARM_UP + rounds)]
            deciles = (quantiles(own, n=10)[0] for own in zip(*laps[WARM_UP:], strict=True))
            found.append(Cost(number, batch_size, *deciles))
    torch.set_num_threads(before)
    for engine in engines:
        engine.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print both costs and their ratio; exit status 1 if the draft costs more than a third."""
    parser = argparse.ArgumentParser(prog="python -m training.draft_cost", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=CHECKPOINT, help="checkpoint directory of the draft")
    parser.add_argument("--threads", type=int, nargs="+", default=(), help="CPU threads; default: one, and all cores")
    args = parser.parse_args(argv)
    costs = measure_cost(args.path, threads=args.threads)
    for cost in costs:
        print(
            f"threads {cost.threads}, batch {cost.batch_size}: target {cost.target * 1e6:.0f} us, "
            f"draft {cost.draft * 1e6:.0f} us, ratio {cost.ratio:.2f}"
        )
    return int(any(cost.ratio > LARGEST_RATIO for cost in costs))


if __name__ == "__main__":
    raise SystemExit(main())
