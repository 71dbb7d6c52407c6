"""Limits of the loads of `peers` in m6: memory, arithmetic and Python, and the distance from them.

From the trace of a load's steps follow the bytes that each must read and the operations that it must compute. At the
speed of the machine these take some time, and a step at least the longer of the two. KV of a shared prefix counts once
per step. The same load with kernels that compute nothing takes the time of its Python. Of a load in `tok/s after the
first` only the decode steps count, in all of these.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.empty_kernels import empty_kernels
from benchmarks.engines import EMBEDDED, build, random_model
from benchmarks.lesson import SEED, Lesson, Row, Size
from benchmarks.machine import READ_BYTES, best_seconds, peak_flops, read_bandwidth
from benchmarks.peers.loads import AFTER_FIRST, LOADS, Load
from benchmarks.reference import decoder_shape
from benchmarks.roofline import forward_flops
from benchmarks.traces import watched

NAMES = [name for name, load in LOADS.items() if "tok/s" in load.unit]
MAX_LEN = 8192
STEPS = 300
STEP_PARTS = {
    "choose the batch, allocate slots": ("scheduler", "schedule"),
    "make the tensors of the step": ("runner", "prepare"),
    "call the layers": ("runner", "forward"),
    "call the output layer, take the tokens": ("runner", "sample"),
    "commit the tokens": ("scheduler", "update_from_output"),
    "make the outputs, with text": ("core", "_make_outputs"),
}
"""Parts of a step, and the method that is each of them."""
WIDTH, MANY = 1024, 768
"""Inputs of a layer that measures the machine, and rows for which arithmetic is its limit."""


def limits(name: str, size: Size) -> Row:
    """Return the seconds of a load, of its Python, and at the limits of the machine, step by step the longer one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:  # other kernels
        python = pool.submit(answered, name, size.rounds, torch.get_num_threads(), without_kernels=True).result()
    row = answered(name, size.rounds, torch.get_num_threads())
    machine = roof(torch.float32 if LOADS[name].model == "tiny" else torch.bfloat16)
    memory = [read / machine["bandwidth"] for _, read in row["steps"]]
    arithmetic = [flop / machine["flops"] for flop, _ in row["steps"]]
    return {
        "machine": machine,
        "steps": len(memory),
        "seconds": row["seconds"],
        "python": python["seconds"],
        "memory": sum(memory),
        "arithmetic": sum(arithmetic),
        "bound": sum(map(max, memory, arithmetic)),
    }


def answered(name: str, rounds: int, threads: int, *, without_kernels: bool = False) -> Row:
    """Return the median seconds of a load, and, with kernels, the operations and bytes of each of its steps."""
    load, params = LOADS[name], {"temperature": 0, "ignore_eos": True}
    torch.set_num_threads(threads)
    with TemporaryDirectory() as folder, empty_kernels() if without_kernels else nullcontext():
        model = EMBEDDED
        if load.model != "tiny":
            model = random_model(Path(folder), max_position_embeddings=MAX_LEN)
        engine, shape = engine_of(load, model), decoder_shape(model)
        from m6_multimodal_pd import SamplingParams

        prompts, outputs = load.requests(SEED)
        each = [SamplingParams(max_tokens=length, **params) for length in outputs]

        def answer() -> float:
            engine.flush_cache()
            began = time.perf_counter()
            found = engine.generate_batch(prompts, each, progress=False).values()
            assert all(output.finish_reason == "length" for output in found), "a request has failed"
            if load.unit == AFTER_FIRST:
                began += max(output.metrics.time_to_first_token for output in found)
            return time.perf_counter() - began

        answer()
        seconds = statistics.median(answer() for _ in range(rounds))
        steps = [] if without_kernels else costs(engine, load, shape, answer)
        engine.close()
    return {"seconds": seconds, "steps": steps}


def engine_of(load: Load, model: Any) -> Any:
    """Return m6's engine with the settings that the load has in `peers`."""
    own = load.variants.get("stepwise", {})
    longest = load.shared + load.prompts[1] + load.outputs[1]
    settings: dict[str, Row] = {
        "model": {
            "model": str(model.directory),
            "dtype": model.dtype,
            "load_format": model.load_format,
            "device": "cpu",
            "max_model_len": longest + 1,
        },
        "cache": {"max_total_tokens": load.shared + load.number * (longest - load.shared + 32) + 512},
        "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    }
    for name, value in own.items():
        settings["cache" if name == "kv_cache_dtype" else "model"][name] = value
    return build("m6", **settings)


def costs(engine: Any, load: Load, shape: Any, answer: Callable[[], float]) -> list[tuple[float, float]]:
    """Return the operations and bytes of each step."""
    from m5_chunked_prefill_spec.events import Batch

    core = engine.engine_core
    model = core.executor.worker.model_runner.model
    linears = [
        each
        for layer in model.layers
        for each in (layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]
    weights = sum(each.packed.nbytes for each in (*linears, model.head))
    steps = []
    for batch in watched(engine, answer, Batch)[0]:
        if load.unit == AFTER_FIRST and batch.num_prompts:
            continue
        new, context = batch.extend_lens, batch.prefix_lens
        shared = load.shared * sum(length >= load.shared for length in context[1:]) if load.shared else 0
        tokens = sum(new) + sum(context) - shared
        steps.append((forward_flops(shape, new, context), weights + tokens * core.kv_bytes_per_token))
    return steps


def python_of_a_step(size: Size) -> Row:
    """Return the seconds of Python of a decode step of one request, as a whole and by part."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts: Row = pool.submit(step_by_part, size.rounds).result()
    return parts


def step_by_part(rounds: int) -> Row:
    """Measure the parts of a step one after the other, so that no measurement is in another, without kernels."""
    from m6_multimodal_pd import LLMEngine, ModelConfig, SamplingParams

    torch.set_num_threads(1)
    with empty_kernels():
        engine = LLMEngine(model_config=ModelConfig(model=str(EMBEDDED.directory), device="cpu", dtype="float32"))
    core, params = engine.engine_core, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    owners = {"scheduler": core.scheduler, "runner": core.executor.worker.model_runner, "core": core}

    def median_of(owner: Any, name: str) -> float:
        call, seconds = getattr(owner, name), []

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - began)

        setattr(owner, name, timed)
        for _ in range(rounds):
            engine.add_request([300, 301, 302], params)
            while engine.has_unfinished_requests():
                engine.step()
        delattr(owner, name)  # the class has it
        return statistics.median(seconds)

    engine.generate([300, 301, 302], params)
    whole = median_of(engine, "_advance")
    parts = {text: median_of(owners[owner], name) for text, (owner, name) in STEP_PARTS.items()}
    return {"whole": whole, "parts": parts | {"the calls between them": whole - sum(parts.values())}}


@cache
def roof(dtype: torch.dtype) -> Row:
    """Return the bytes and operations per second of this machine: the best of torch and of a native layer."""
    from m3_paged_attention.attention.registry import resolve

    backend = resolve("auto", torch.device("cpu"))
    linear = backend.linear(torch.zeros(READ_BYTES // dtype.itemsize // WIDTH, WIDTH, dtype=dtype))
    one, many = torch.randn(1, WIDTH).to(dtype), torch.randn(MANY, WIDTH).to(dtype)
    small = backend.linear(torch.randn(4 * WIDTH, WIDTH).to(dtype))
    return {
        "bandwidth": max(read_bandwidth(), linear.packed.nbytes / best_seconds(lambda: linear(one))),
        "flops": max(peak_flops(dtype), 8 * MANY * WIDTH**2 / best_seconds(lambda: small(many))),
    }


LESSON = Lesson(
    "limits",
    lambda size: {"python": partial(python_of_a_step, size)} | {name: partial(limits, name, size) for name in NAMES},
    rounds=5,
)
