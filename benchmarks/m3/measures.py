"""m3: ragged batches, and forwards and the scheduler of an m3 engine."""

from typing import Any

from benchmarks.engines import Engines
from benchmarks.lesson import SEED
from benchmarks.reference import decoder_shape
from benchmarks.roofline import Forwards, under_roof
from benchmarks.workloads import Workload, drawn

PREFILLS = (16, 64, 256, 512)
BATCHES = (1, 16, 64)


def ragged(number: int, quick: bool) -> Workload:
    """Return requests of very different lengths."""
    prompts, outputs = ((32, 64), (4, 16)) if quick else ((32, 512), (16, 256))
    return drawn(number, prompts=prompts, outputs=outputs, seed=SEED)


def roofline(engines: Engines, *, context: int, num_decodes: int) -> Any:
    """Measure prefills and decode steps of different sizes below the roof of the machine."""
    engine = engines("m3", scheduler={"max_num_seqs": max(BATCHES)})
    forwards = Forwards(engine, decoder_shape(engines.model), engines.model.dtype, SEED)
    points = [forwards.prefill(length) for length in PREFILLS]
    points += [forwards.decode(size, context, num_decodes) for size in BATCHES]
    return under_roof(points, engines.model.dtype)
