"""The engine on a CUDA device, natively: the tokens of m1 in float32, close numbers in bfloat16, real memory.

`pytest -m gpu` runs these where there is a GPU; elsewhere they are deselected, and a line says how many. In bfloat16
two programs that add in another order differ in the third digit, so answers are not compared token by token: both see
the same tokens (teacher forcing), and must agree on the best one wherever it leads by more than 0.05.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import m1_single_request
import m3_paged_attention
from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention import (
    DEFAULT_MODEL,
    CacheConfig,
    ConfigError,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from tests.equivalence.draws import MeasuringSampler, gaps_of
from tests.equivalence.forced_preemption import ForcedPreemption
from tests.equivalence.harness import Reference, compare
from tests.equivalence.models import ARCHITECTURES, save_random_model
from tests.equivalence.prompts import twenty_prompts
from tests.m3_paged_attention.engines import InTurn, Recorder, check_drained, greedy
from tests.support.engines import unfinished

pytestmark = pytest.mark.gpu

MAX_TOKENS = 16
CLEAR = 0.05
MODELS = ["embedded", *ARCHITECTURES]
BACKENDS = ["torch", "triton"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory(name)`: one of `MODELS`, as files."""
    found: dict[str, Path] = {"embedded": Path(DEFAULT_MODEL)}

    def get(name: str) -> Path:
        if name not in found:
            found[name] = save_random_model(tmp_path_factory.mktemp(name), name)
        return found[name]

    return get


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: no TF32 in the products that are compared. Afterwards the memory is given back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    torch.cuda.empty_cache()


def build(
    directory: Path,
    *,
    backend: Any = "auto",
    dtype: str = "float32",
    parts: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **cache: Any,
) -> LLMEngine:
    sized = {"num_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization"} & cache.keys()
    return LLMEngine(
        model_config=ModelConfig(model=directory, device="cuda", dtype=dtype, attention_backend=backend),
        scheduler_config=SchedulerConfig(**{"max_num_seqs": 8} | (scheduler or {})),
        cache_config=CacheConfig(**cache if sized else {"num_blocks": 2000} | cache),
        parts=parts,
    )


def m1_answers(directory: Path, prompts: list[Any], params: Any) -> list[Reference]:
    """m1's on the CPU, with how clear each choice was."""
    sampler, found = MeasuringSampler(), []
    config = m1_single_request.ModelConfig(model=directory, device="cpu", dtype="float32")
    with m1_single_request.LLMEngine(model_config=config, parts={"sampler": lambda: sampler}) as engine:
        for prompt in prompts:
            sampler.margins.clear()
            output = engine.generate(prompt, params)
            found.append(Reference(output.prompt_token_ids, output.token_ids, gaps_of(sampler.margins)))
    return found


def prompts_of(engine: LLMEngine, share: int = 2) -> list[Any]:
    return twenty_prompts(engine.engine_core.input_processor.tokenizer)[::share]


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_answers_are_those_of_m1_on_the_cpu(directory: Callable[[str], Path], backend: str, name: str) -> None:
    with build(directory(name), backend=backend) as engine:
        assert engine.engine_core.executor.worker.model_runner.model.backend.name == backend
        prompts = prompts_of(engine)
        outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=MAX_TOKENS))
        check_drained(engine)
    expected = m1_answers(directory(name), prompts, m1_single_request.SamplingParams(max_tokens=MAX_TOKENS))
    clear = [reference for reference in expected if reference.cut is None]
    assert len(clear) >= len(expected) - 1
    for output, reference in zip(outputs.values(), expected, strict=True):
        assert output.error is None
        if reference.cut is None:
            assert output.token_ids == reference.token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_preemption_in_every_third_step_changes_no_token(
    directory: Callable[[str], Path], block_size: int, mode: str
) -> None:
    scheduler, parts = {"preemption_mode": mode}, {"scheduler": ForcedPreemption}
    with build(directory("qwen3"), block_size=block_size, scheduler=scheduler, parts=parts) as engine:
        prompts = prompts_of(engine, 4)
        outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=MAX_TOKENS))
        assert engine.stats().num_preemptions > 0
        check_drained(engine)
    expected = m1_answers(directory("qwen3"), prompts, m1_single_request.SamplingParams(max_tokens=MAX_TOKENS))
    compare(expected, [output.token_ids for output in outputs.values()])


def test_four_outputs_are_four_single_answers(directory: Callable[[str], Path]) -> None:
    values: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "top_k": 5, "ignore_eos": True}
    with build(directory("qwen3"), block_size=4) as engine:
        output = engine.generate(prompts_of(engine)[0], SamplingParams(n=4, seed=30, **values))
        prompt = list(output.prompt_token_ids)
        check_drained(engine)
    for index, completion in enumerate(output.outputs):
        params = m1_single_request.SamplingParams(seed=30 + index, **values)
        compare(m1_answers(directory("qwen3"), [prompt], params), [completion.token_ids])


# --- close numbers ----------------------------------------------------------------------------------------------------


class Forcing(Sampler):
    """Keeps the logits, and gives the next of the tokens that were decided before."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.rows: list[Tensor] = []

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        self.rows.extend(logits.float().cpu())
        return torch.full((len(logits),), self.token_ids[len(self.rows) - 1], device=logits.device)


def forced_logits(package: Any, config: Any, prompt: list[int], token_ids: list[int], **settings: Any) -> Tensor:
    """`[outputs, vocab]`: what an engine computes if the tokens are these."""
    sampler = Forcing(token_ids)
    with package.LLMEngine(model_config=config, parts={"sampler": lambda: sampler}, **settings) as engine:
        engine.generate(prompt, SamplingParams(max_tokens=len(token_ids), ignore_eos=True))
    return torch.stack(sampler.rows)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_logits_are_as_close_as_transformers_and_agree_where_the_best_is_clear(
    directory: Callable[[str], Path], backend: Any, name: str
) -> None:
    """Held to float32 on the CPU, beside transformers' model in bfloat16 on the same device, which rounds as often."""
    where = directory(name)
    exact = m1_single_request.ModelConfig(model=where, device="cpu", dtype="float32")
    theirs = m1_single_request.ModelConfig(model=where, device="cuda", dtype="bfloat16")
    ours = ModelConfig(model=where, device="cuda", dtype="bfloat16", attention_backend=backend)
    with m1_single_request.LLMEngine(model_config=exact) as engine:
        answers = [engine.generate(prompt, greedy(MAX_TOKENS)) for prompt in prompts_of(engine, 5)]
    errors, usual, close = [], [], []
    for answer in answers:
        forced = list(answer.prompt_token_ids), list(answer.token_ids)
        wanted = forced_logits(m1_single_request, exact, *forced)
        found = forced_logits(m3_paged_attention, ours, *forced, cache_config=CacheConfig(num_blocks=200))
        assert found.isfinite().all()
        errors.append((found - wanted).abs())
        usual.append((forced_logits(m1_single_request, theirs, *forced) - wanted).abs())
        best = wanted.topk(2, dim=-1).values  # [outputs, 2]
        clear = best[:, 0] - best[:, 1] > max(CLEAR, 6 * float(usual[-1].mean()))
        close += [bool(clear.any())]
        assert torch.equal(found.argmax(dim=-1)[clear], wanted.argmax(dim=-1)[clear])
    assert any(close)
    mine, others = torch.cat(errors), torch.cat(usual)  # all answers together: how one of them rounds is luck
    assert mine.mean() <= 1.5 * others.mean() + 1e-3
    assert mine.quantile(0.999) <= 1.5 * others.quantile(0.999) + 1e-2


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_device_is_measured_and_kept(directory: Callable[[str], Path]) -> None:
    """Many long requests, so that nothing but the share bounds the number of blocks."""
    limits = {"max_num_seqs": 8_192, "max_num_batched_tokens": 65_536}
    share = 0.3
    with build(directory("embedded"), scheduler=limits, gpu_memory_utilization=share) as engine:
        stats, spec = engine.stats(), engine.engine_core.executor.kv_cache_spec(16)
        free, total = torch.cuda.mem_get_info()
        taken = (stats.num_blocks + 1) * spec.block_bytes
        assert taken <= share * total
        assert total - free <= (share + 0.02) * total
        most = limits["max_num_seqs"] * -(-engine.engine_core.input_processor.max_model_len // 16)
        assert stats.num_blocks == most or taken > 0.5 * share * total
        assert engine.generate("a", greedy(4)).error is None


def test_the_sizing_says_what_the_profile_saw(directory: Callable[[str], Path]) -> None:
    recorder = Recorder()
    with LLMEngine(
        model_config=ModelConfig(model=directory("embedded"), device="cuda"),
        cache_config=CacheConfig(gpu_memory_utilization=0.5),
        trace_config=m1_single_request.TraceConfig(readers=(recorder,)),
    ):
        (event,) = recorder.events("kv_sized")
        assert event.source == "gpu_memory_utilization" and event.gpu_memory_utilization == 0.5
        assert event.total_bytes == torch.cuda.mem_get_info()[1]
        assert 0 < event.peak_bytes < event.total_bytes
        assert event.budget_bytes == int(event.total_bytes * 0.5) - event.peak_bytes
        assert "50% of" in event.explain()


def test_a_share_too_small_is_refused_with_one_that_works(directory: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        build(directory("embedded"), gpu_memory_utilization=1e-9)


def test_more_blocks_than_the_device_has_are_refused(directory: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        build(directory("embedded"), num_blocks=10**12)
    with build(directory("embedded")) as engine:
        assert engine.generate("a", greedy(2)).error is None, "the device is as usable as before"


def test_requests_are_swapped_to_pinned_memory_and_back(directory: Callable[[str], Path]) -> None:
    parts = {"preemption": InTurn}
    scheduler = {"preemption_mode": "swap", "max_num_seqs": 4}
    prompts = [[31, 32, 33, 34], [41, 42], [51, 52, 53], [61]]
    with build(directory("qwen3"), num_blocks=9, block_size=4, scheduler=scheduler, parts=parts) as engine:
        kv = engine.engine_core.executor.worker.model_runner.kv
        assert kv.host_blocks.is_pinned() and kv.host_blocks.device.type == "cpu"
        recorder = Recorder(engine.tracer)
        outputs = engine.generate_batch(prompts, greedy(12))
        directions = {event.direction for event in recorder.events("blocks_swapped")}
        assert directions == {"in", "out"}
        check_drained(engine)
    params = m1_single_request.SamplingParams(max_tokens=12, ignore_eos=True)
    compare(m1_answers(directory("qwen3"), prompts, params), [output.token_ids for output in outputs.values()])


def test_a_closed_engine_gives_its_memory_back(directory: Callable[[str], Path]) -> None:
    torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda"))  # cuBLAS keeps a workspace from here on
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with build(directory("embedded"), num_blocks=1000) as engine:
        engine.add_request("a", greedy(5))
        for _ in unfinished(engine):
            engine.step()
        assert torch.cuda.memory_allocated() > before
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20
