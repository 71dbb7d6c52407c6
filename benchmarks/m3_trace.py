"""Writes the trace that the page of milestone 3 explains, and its pictures: `python -m benchmarks.m3_trace`.

Two prompts in eight blocks of four tokens. One of them asks for two continuations, so there is a fork, and where the
two part a copy on write. In step 5 two requests need a new block and one is free: somebody is preempted, and comes back
in step 7. Times, probabilities and the choice of kernels are left out, so every machine writes the same
`results/m3_paged_attention_trace.txt`.
"""

import io

from rich.console import Console

from benchmarks import RESULTS
from m1_single_request.events import EngineStarted, StepDone
from m1_single_request.output_events import Sampled
from m1_single_request.tracer import TraceReader, TraceRecord
from m3_paged_attention import (
    CacheConfig,
    ConsoleReader,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from m3_paged_attention.events import BackendChosen, ThreadsChanged

MODEL = ModelConfig(max_model_len=32)
MEMORY = CacheConfig(block_size=4, num_blocks=8)
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
REQUESTS = {
    "nine": ("A KV cache keeps the attention keys and values", SamplingParams(max_tokens=6)),
    "six": (
        "A scheduler chooses which requests",
        SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True),
    ),
}
"""Prompt and parameters of each request. Its name is the number of its prompt tokens."""


class Decisions(TraceReader):
    """The verbose console, without times, without the model's favourites and without what this machine has."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.reader = ConsoleReader(console=Console(file=self.text, width=84, highlight=False))

    def read(self, record: TraceRecord) -> None:
        """Pass on what is the same on every machine."""
        if not isinstance(record.event, BackendChosen | EngineStarted | Sampled | StepDone | ThreadsChanged):
            self.reader.read(record)

    def close(self) -> None:
        """Close the console."""
        self.reader.close()


def run(*readers: TraceReader) -> None:
    """Serve the two requests while the readers listen."""
    trace = TraceConfig(readers=readers)
    with LLMEngine(model_config=MODEL, cache_config=MEMORY, scheduler_config=LIMITS, trace_config=trace) as engine:
        for rid, (prompt, params) in REQUESTS.items():
            engine.add_request(prompt, params, request_id=rid)
        while engine.has_unfinished_requests():
            engine.step()


def traced_steps() -> str:
    """What the console says of the two requests."""
    decisions = Decisions()
    run(decisions)
    return "\n".join(line.rstrip() for line in decisions.text.getvalue().strip("\n").splitlines()) + "\n"


def main() -> int:
    """Write the file and the pictures, and print the trace."""
    from benchmarks.m3_pictures import draw_pictures  # needs matplotlib

    text = traced_steps()
    (RESULTS / "m3_paged_attention_trace.txt").write_text(text, encoding="utf-8")
    draw_pictures()
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
