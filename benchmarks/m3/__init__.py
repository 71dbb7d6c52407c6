"""The measurements of lesson 3: `python -m benchmarks m3`."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import lesson
from benchmarks.engines import EMBEDDED, SHAPE_0_6B, Engines, Model, random_model
from benchmarks.lesson import SEED, Lesson, Parts, Size

KV_BYTES = 2 * 2**30
QUICK_SHAPE = {"num_hidden_layers": 4, "vocab_size": 16384}


def shape(quick: bool) -> dict[str, Any]:
    """Return the environment's entries: the shape of the random model, and the backend."""
    return {"random_model": SHAPE_0_6B | (QUICK_SHAPE if quick else {})} | lesson.backend()


def on_random_model(run: Callable[[Engines], Any], quick: bool, **settings: Any) -> Any:
    """Measure on engines with random weights in the shape of Qwen3-0.6B."""
    with TemporaryDirectory() as folder:
        model = random_model(Path(folder), **(QUICK_SHAPE if quick else {}))
        return on_model(run, model, **settings)


def on_model(run: Callable[[Engines], Any], model: Model = EMBEDDED, **settings: Any) -> Any:
    """Measure on engines with a checkpoint, by default the embedded one."""
    with Engines(model, seed=SEED, **settings) as engines:
        return run(engines)


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks import scheduling
    from benchmarks.m3 import memory, speed
    from benchmarks.workloads import drawn

    def random(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: on_random_model(run, size.quick, kv_bytes=KV_BYTES)

    def embedded(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: on_model(run, kv_bytes=KV_BYTES)

    length, rounds = (16 if size.quick else 64), size.rounds
    few, many = (speed.lengths(number, size.quick) for number in (16, 64))
    growing = drawn(64, prompts=(16, 64), outputs=(48, 96) if size.quick else (128, 256), seed=SEED)
    return {
        "single_0_6b": random(
            lambda e: speed.single_stream(e, prompt_len=2 * length, num_tokens=length, rounds=rounds)
        ),
        "ragged_0_6b": random(lambda e: speed.ragged_16(e, few, rounds=size.few)),
        "roofline_0_6b": random(lambda e: speed.roofline(e, context=length, num_decodes=8)),
        "single_embedded": embedded(lambda e: speed.single_text(e, num_tokens=2 * length, rounds=2 * rounds)),
        "ragged_embedded": embedded(lambda e: speed.ragged_64(e, many, rounds=rounds)),
        "roofline_embedded": embedded(lambda e: speed.roofline(e, context=2 * length, num_decodes=32)),
        "scheduling": lambda: scheduling.milestones("m3", num_steps=50 if size.quick else 400),
        "fragmentation_16": embedded(lambda e: memory.fragmentation(e, few, max_num_seqs=16)),
        "fragmentation_64": embedded(lambda e: memory.fragmentation(e, many, max_num_seqs=64)),
        "preemption": embedded(lambda e: memory.preemption(e, growing, max_num_seqs=64, rounds=size.few)),
        "parallel_sampling": embedded(
            lambda e: memory.parallel_sampling(e, prompt_len=8 * length, num_tokens=length, rounds=rounds)
        ),
    }


LESSON = Lesson("m3_paged_attention", parts, environment=shape)
