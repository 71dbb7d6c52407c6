"""The measurements on a GPU: what the machine can do, and what an engine makes of it.

Shares are of what this machine reached in the part `machine`: bytes per second of *reading* memory (a copy also writes,
and gives another number) and operations per second of a large matrix product. The bytes and operations of a step are
those of `roofline.py`. Times are those of whole steps, with all work of the host.
"""

import atexit
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import engines, machine, reference
from benchmarks.engines import Model, random_model
from benchmarks.lesson import SEED, Row, Size
from benchmarks.m6_overlap.measures import Decoded, answer_tokens, decoded
from benchmarks.roofline import forward_bytes, forward_flops
from benchmarks.serving import answer
from benchmarks.timing import in_turns
from benchmarks.workloads import Workload, drawn, tokens

READ_BYTES, MATRIX_SIZE = 4 * 2**30, 8192
CONTEXT, STEPS = 512, 100
WAYS = {
    "eager": (False, False),
    "eager, overlapped": (False, True),
    "graphs": (True, False),
    "graphs, overlapped": (True, True),
}
"""By name: whether steps are captured, and whether they overlap."""
PROMPTS = [(1, 2048), (1, 8192), (16, 512)]
LENGTHS = (100, 1024)
STATIC_BATCH = 64


class Bench:
    """All measurements of one model. Its weights are loaded once; the engines of a part are built and closed by it."""

    def __init__(self, device: str, shape: Mapping[str, Any], size: Size) -> None:
        """`shape`: fields of the model's configuration."""
        self.device, self.shape, self.quick, self.rounds = torch.device(device), dict(shape), size.quick, size.rounds
        self._loaded: Any = None

    @cached_property
    def model(self) -> Model:
        """The model's directory, without weights: they are drawn on the device."""
        folder = TemporaryDirectory()
        atexit.register(folder.cleanup)
        return replace(random_model(Path(folder.name), **self.shape), name="8B")

    @cached_property
    def roof(self) -> Row:
        """What the machine can do, measured once in a run."""
        memory = torch.ones((2**28 if self.quick else READ_BYTES) // 4, device=self.device)
        reads: list[Callable[[], Any]] = [memory.sum, memory.amax, lambda: torch.linalg.vector_norm(memory)]
        bandwidth = memory.nbytes / min(map(self._seconds, reads))
        side = 1024 if self.quick else MATRIX_SIZE
        a, b = torch.randn(2, side, side, device=self.device).bfloat16()
        return {"bandwidth": bandwidth, "flops": 2 * side**3 / self._seconds(lambda: a @ b)}

    def machine(self) -> Row:
        """Measure bytes per second of reading, and operations per second in bfloat16."""
        return self.roof

    def decode(self, batch: int) -> Row:
        """Measure decode steps of `batch` requests in all ways, in turns."""
        context, num_steps = (64, 8) if self.quick else (CONTEXT, STEPS)
        rng = Random(SEED)
        prompts = [tokens(rng, context) for _ in range(batch)]
        limits = {"max_num_seqs": batch, "max_num_batched_tokens": batch * context}
        kv = {"kv_tokens": batch * (context + answer_tokens(num_steps) + 32)}
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(
                    self._engine(graphs=graphs, cache=kv, scheduler=limits | {"enable_overlap": overlap})
                )
                for name, (graphs, overlap) in self._ways().items()
            }
            threads = torch.get_num_threads()
            runs = in_turns(
                {name: lambda own=own: decoded(own, threads, prompts, num_steps) for name, own in sides.items()},
                rounds=self.rounds,
            )
        middle = context + answer_tokens(num_steps) // 2
        moved = forward_bytes(self.decoder, self.model.dtype, [1] * batch, [middle] * batch)
        rows = {name: self._way(own, batch, moved) for name, own in runs.items()}
        answers = [run.answers for own in runs.values() for run in own]
        return {"requests": batch, "context": context, "bytes": moved, "ways": rows, "same_tokens": same(answers)}

    def prefill(self) -> Row:
        """Measure prompts without decodes."""
        rows = []
        for number, length in [(2, 64)] if self.quick else PROMPTS:
            work = drawn(number, prompts=(length, length), outputs=(1, 1), seed=SEED)
            limits = {"max_num_seqs": number, "max_num_batched_tokens": number * length, "enable_overlap": False}
            kv = {"kv_tokens": number * (length + 32)}
            with self._engine(graphs=False, cache=kv, scheduler=limits) as engine:
                seconds = statistics.median([answer(engine, work).seconds for _ in range(self.rounds + 1)][1:])
            flop = forward_flops(self.decoder, [length] * number, [0] * number)
            share = flop / seconds / self.roof["flops"]
            rows.append({"prompts": number, "tokens": length, "seconds": seconds, "flop": flop, "share": share})
        return {"rows": rows}

    def many(self) -> Row:
        """Measure many requests at once, with the sizes that the engine chooses for this device."""
        work = self._many()
        with self._engine() as engine:
            answer(engine, work.shortened())
            served, most = answer(engine, work), engine.engine_core.scheduler.max_num_seqs
        counts = {"max_num_seqs": most, "num_steps": served.counts["num_steps"]}
        return work.describe() | counts | _speed(work, served.seconds)

    def transformers(self) -> Row:
        """Measure `generate` of transformers: the first requests of the same, as one static batch."""
        work = self._many()
        work = replace(work, requests=work.requests[:STATIC_BATCH])
        self._loaded = None  # it has weights of its own
        model = reference.load(self.model, SEED, self.device)
        run = reference.static(STATIC_BATCH)
        run(model, work.shortened())
        served = run(model, work)
        return work.describe() | _speed(work, served.seconds)

    # --- inside -------------------------------------------------------------------------------------------------------

    @cached_property
    def decoder(self) -> Any:
        """The shape of the model's decoder."""
        return reference.decoder_shape(self.model)

    def _ways(self) -> dict[str, tuple[bool, bool]]:
        """Return the ways of running steps; graphs are CUDA's."""
        return {name: way for name, way in WAYS.items() if self.device.type == "cuda" or not way[0]}

    def _engine(self, *, graphs: bool | None = None, **settings: Any) -> Any:
        model = {"model": self.model.directory, "device": str(self.device), "dtype": self.model.dtype, "seed": SEED}
        model |= {"load_format": "dummy", "cuda_graphs": graphs}
        return engines.build("m6", parts={"model_loader": self._load}, model=model, **settings)

    def _load(self, config: Any, kv_cache_dtype: Any) -> Any:
        """Load the model for the first engine, and give all others the same weights."""
        from m6_multimodal_pd import LLMEngine

        if self._loaded is None:
            self._loaded = LLMEngine.parts["model_loader"](config, kv_cache_dtype)
        return self._loaded

    def _way(self, runs: list[Decoded], batch: int, moved: float) -> Row:
        """Return the numbers of one way of decoding."""
        step = statistics.median(run.step for run in runs)
        shares = {"share": moved / step / self.roof["bandwidth"]}
        if any(run.device for run in runs):
            shares |= {"hidden": statistics.median(run.hidden for run in runs)}
        return {"step": step, "tokens_per_second": batch / step} | shares

    def _many(self) -> Workload:
        number, lengths = (8, (10, 30)) if self.quick else (256, LENGTHS)
        return drawn(number, prompts=lengths, outputs=lengths, seed=SEED)

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of the fastest of several calls, until the device has ended them."""

        def ended() -> None:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return machine.best_seconds(ended, repeats=10)


def same(answers: list[Any]) -> bool:
    """Return whether all answers are equal."""
    return all(other == answers[0] for other in answers)


def _speed(work: Workload, seconds: float) -> Row:
    return {"seconds": seconds, "tokens_per_second": work.num_output_tokens / seconds}
