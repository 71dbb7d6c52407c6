"""Writes the trace that the page of milestone 2 explains: `python -m benchmarks.m2_trace`.

Prompts of 9, 3 and 5 tokens make a step of 17 tokens, then one of 3; one of them ends, and a prompt of 12 tokens joins
the other two: a step of 14. Times and probabilities are left out, so every machine writes the same
`results/m2_continuous_batching_trace.txt`.
"""

import io

from rich.console import Console

from benchmarks import RESULTS
from m1_single_request.events import StepDone
from m1_single_request.output_events import Sampled
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching import ConsoleReader, LLMEngine, SamplingParams, SchedulerConfig

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
REQUESTS = {
    "nine": ("A KV cache keeps the attention keys and values", 4),
    "three": ("A token is", 2),
    "five": ("Decode is the phase", 3),
    "twelve": ("Decode is the phase after the prefill: the model normally", 2),
}
"""Prompt and `max_tokens` of each request. Its name is the number of its prompt tokens; `twelve` comes after step 2."""


def traced_steps() -> str:
    """What the verbose console says of the four requests, without times and without the model's favourites."""
    text = io.StringIO()
    reader = ConsoleReader(console=Console(file=text, width=96, highlight=False))

    class Decisions:
        def read(self, record: TraceRecord) -> None:
            if not isinstance(record.event, Sampled | StepDone):
                reader.read(record)

        def close(self) -> None:
            reader.close()

    with LLMEngine(scheduler_config=LIMITS) as engine:
        engine.tracer.attach(Decisions())
        for rid, (prompt, max_tokens) in REQUESTS.items():
            if rid == "twelve":
                engine.step()
                engine.step()
            engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), request_id=rid)
        while engine.has_unfinished_requests():
            engine.step()
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines()) + "\n"


def main() -> int:
    """Write the file, and print it."""
    text = traced_steps()
    (RESULTS / "m2_continuous_batching_trace.txt").write_text(text, encoding="utf-8")
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
