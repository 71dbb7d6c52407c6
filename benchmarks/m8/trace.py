"""The trace that the page of milestone 8 explains: the collectives of one decode step on two ranks, without times."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import HERE

QUESTIONS = ("What is prefill?", "What is a batch?", "What is decode?")


def answer(folder: Path) -> None:
    """Answer the questions on all ranks, with a trace of each."""
    from m8_parallel import LLMEngine, ModelConfig, SamplingParams, TraceConfig
    from m8_parallel.config import ParallelConfig

    with LLMEngine(
        model_config=ModelConfig(device="cpu", dtype="float32"),
        parallel_config=ParallelConfig(tensor_parallel_size=2),
        trace_config=TraceConfig(jsonl=folder / "trace.jsonl"),
    ) as engine:
        prompts = [engine.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
        engine.generate_batch(prompts, SamplingParams(max_tokens=4, ignore_eos=True))


def uses(kinds: list[str]) -> list[str]:
    """Return what each collective of a step is for."""
    num_layers = (kinds.count("all-reduce") - 1) // 2
    of_layers = [f"layer {layer}: {part}" for layer in range(num_layers) for part in ("attention", "MLP")]
    return ["inputs", "embedding", *of_layers, "logits", "sampled tokens"]


def traced_steps() -> str:
    """Return the collectives of the last step, a line for each."""
    with TemporaryDirectory() as name:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run(
            [*torchrun, "-m", "benchmarks.m8.trace", name], cwd=HERE, check=True, capture_output=True, timeout=120
        )
        files = [Path(name) / "trace.jsonl", Path(name) / "trace.rank-1.jsonl"]
        first, second = ([json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in files)
    own, other = ([event for event in events if event["event"] == "collectives"][-1] for events in (first, second))
    batch = [event for event in first if event["event"] == "batch"][-1]
    rows: list[tuple[Any, ...]] = [("", "collective", "bytes of rank 0", "bytes of rank 1", "")]
    each = zip(own["kinds"], own["sizes"], other["sizes"], uses(own["kinds"]), strict=True)
    rows += [(number, kind, f"{a:,}", f"{b:,}", use) for number, (kind, a, b, use) in enumerate(each, 1)]
    lines = [f"step {own['step']}: {len(batch['rids'])} requests decode"]
    lines += [f"{number!s:>3}  {kind:<11}{a:>16}{b:>17}  {use}".rstrip() for number, kind, a, b, use in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
