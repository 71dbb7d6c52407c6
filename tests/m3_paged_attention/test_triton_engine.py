"""The whole engine on the Triton kernels, in Triton's interpreter: the tokens of the torch backend.

An attention program takes milliseconds there, so these are few tokens: what the kernels compute is tested in
`tests/kernels`, and here only that the engine asks them for it. `test_gpu.py` runs more, natively.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m3_paged_attention import CacheConfig, ConfigError, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from m3_paged_attention.attention.registry import resolve
from m3_paged_attention.model_loader import load_model
from tests.m3_paged_attention.engines import check_drained, greedy
from tests.support.engines import drain

pytestmark = pytest.mark.interpreter
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: tests/conftest.py says so in a line", allow_module_level=True)

PROMPTS = [[31, 32, 33, 34, 35], [41], [51, 52, 53]]


def build(directory: Path, backend: Any, **cache: Any) -> LLMEngine:
    return LLMEngine(
        model_config=ModelConfig(model=directory, device="cpu", dtype="float32", attention_backend=backend),
        scheduler_config=SchedulerConfig(max_num_seqs=4, preemption_mode="swap"),
        cache_config=CacheConfig(**{"block_size": 4, "num_blocks": 32} | cache),
    )


def test_a_model_whose_heads_are_too_wide_is_refused_when_it_is_loaded(tiny_directory: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_directory, tmp_path / "wide"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"head_dim": 320}))
    settings: dict[str, Any] = {"model": directory, "device": "cpu", "load_format": "dummy"}
    with pytest.raises(
        ConfigError, match="head_dim of at most 256, and this model's is 320: use attention_backend='to"
    ):
        load_model(ModelConfig(**settings, attention_backend="triton"))
    assert load_model(ModelConfig(**settings, attention_backend="torch")).model.config.head_dim == 320


def test_a_format_without_kernels_is_refused(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(model=tiny_directory, device="cpu", attention_backend="triton", quantization="int8")
    with pytest.raises(ConfigError, match="quantization='int8' has no kernels in the backend triton"):
        load_model(config)
    check, on_gpu = resolve("triton", torch.device("cpu")).check, SimpleNamespace(device=torch.device("cuda", 0))
    fp8 = torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"'fp8' needs a GPU of compute capability 8\.9 .* cuda:0 has 8\.0"):
        check(on_gpu, 64, fp8, None)  # type: ignore[arg-type]
    check(on_gpu, 64, torch.int8, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check(on_gpu, 64, fp8, None)  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_three_prompts_and_six_tokens_are_those_of_torch(tiny_directory: Path) -> None:
    answers: dict[str, Any] = {}
    for backend in ("torch", "triton"):
        with build(tiny_directory, backend) as engine:
            assert engine.engine_core.executor.worker.model_runner.model.backend.name == backend
            engine.add_request(PROMPTS[0], greedy(6), request_id="0")
            engine.step()
            for number in (1, 2):  # two prefills beside a decode
                engine.add_request(PROMPTS[number], greedy(6, logprobs=1), request_id=str(number))
            answers[backend] = drain(engine)
            check_drained(engine)
    for rid, output in answers["torch"].items():
        other = answers["triton"][rid]
        assert (other.token_ids, other.text) == (output.token_ids, output.text)
        if output.outputs[0].logprobs is not None:
            assert other.outputs[0].cumulative_logprob == pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.exhaustive
def test_forks_copies_and_swaps_work_beneath_the_kernels(tiny_directory: Path) -> None:
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, top_k=5, seed=2, ignore_eos=True)
    answers = []
    for backend, blocks in (("torch", 32), ("triton", 5)):
        with build(tiny_directory, backend, num_blocks=blocks, block_size=2) as engine:
            output = engine.generate([5, 6, 7, 8], params)
            answers.append([completion.token_ids for completion in output.outputs])
            preempted = engine.stats().num_preemptions
            check_drained(engine)
    assert answers[0] == answers[1] and preempted > 0
