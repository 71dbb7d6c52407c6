"""Logits are those of transformers: in every shape, precision and backend, in one piece and cut inside pictures."""

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3_paged_attention.attention import native_library
from m3_paged_attention.config import ModelConfig as PagedConfig
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.models.rotary import RotaryTable
from m6_multimodal_pd import LLMEngine, ModelConfig, ModelLoadError
from m6_multimodal_pd.model_loader import load_model
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from tests.m3_paged_attention.checkpoints import edit_weights
from tests.m3_paged_attention.test_decoder import Paged, tokens_of
from tests.m6_multimodal_pd.engines import greedy, setting
from tests.m6_multimodal_pd.seeing import Theirs, asking, save_seeing_model
from tests.m6_multimodal_pd.vl_models import EXPERTS, WIDE_HEADS, theirs

BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")),
]
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "heads of 128": {"text": WIDE_HEADS},
    "not tied": {"tie_word_embeddings": False},
    "layers of the tower in another order": {"vision": {"deepstack_visual_indexes": [2, 0]}},
    "as many deepstack layers as there are": {"vision": {"deepstack_visual_indexes": [0, 1, 2]}},
    "no deepstack": {"vision": {"deepstack_visual_indexes": []}},
    "experts": {"text": EXPERTS},
    "experts, and entries that only others read": {"text": EXPERTS | {"norm_topk_prob": False, "sliding_window": 8}},
    "experts as wide as the model": {"text": EXPERTS | {"moe_intermediate_size": 64}},
    "experts half as wide, not tied": {"text": EXPERTS | {"moe_intermediate_size": 32}, "tie_word_embeddings": False},
}
CONVERSATIONS: tuple[tuple[str | int, ...], ...] = ((1,), ("a", 1), (2, "b", 3, "c"), ("v", 4), ("d", "w", "a"))
Directory = Callable[..., Path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """`directory(shape)`: one of `SHAPES`, as files."""

    @functools.cache
    def saved(shape: str = "heads of 64") -> Path:
        return save_seeing_model(tmp_path_factory.mktemp("vl"), **SHAPES[shape])

    return saved


@pytest.mark.parametrize(("part", "wrong"), [("config", "qwen3_vl"), ("text_config", "qwen3_moe")])
def test_a_config_of_two_families_is_refused_by_name(tmp_path: Path, part: str, wrong: str) -> None:
    directory = save_seeing_model(tmp_path, text=EXPERTS)
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8"))
    (config if part == "config" else config[part])["model_type"] = wrong
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelLoadError, match="model_type="):
        load_model(ModelConfig(model=directory, device="cpu"))


def of_prompt(logits: Tensor, prompt: Sequence[int]) -> Tensor:
    """The log-probabilities of the tokens of a prompt, but for the first one."""
    return logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def of_engine(directory: Path, conversations: Any = CONVERSATIONS, budget: int = 512, **model: Any) -> Any:
    """The prompts of these conversations, each with the log-probabilities that the engine gives to its tokens."""
    config = ModelConfig(**{"model": directory, "device": "cpu", "dtype": "float32"} | model)
    with LLMEngine(model_config=config, **setting(min(len(conversations), budget), budget)) as engine:
        prompts = [engine.chat_prompt(asking(*parts)) for parts in conversations]
        for prompt, output in zip(
            prompts, engine.generate_batch(prompts, greedy(1, prompt_logprobs=0)).values(), strict=True
        ):
            assert output.error is None and output.prompt_logprobs is not None
            rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            yield prompt, torch.tensor([row[token].logprob for row, token in rows])


def check(directory: Path, *args: Any, **settings: Any) -> None:
    their_model = Theirs(directory)
    for prompt, found in of_engine(directory, *args, **settings):
        wanted = of_prompt(their_model.logits(prompt), prompt)
        assert float(wanted.std()) > 0.5, "the comparison means something"
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(directory: Directory, shape: str) -> None:
    check(directory(shape))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", ["heads of 64", "heads of 128", "experts"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_sees(directory: Directory, backend: str, shape: str) -> None:
    check(directory(shape), budget=9, attention_backend=backend)


@pytest.mark.parametrize("shape", ["experts", "experts as wide as the model", "experts half as wide, not tied"])
def test_experts_are_read_as_the_hub_stores_them(directory: Directory, shape: str, tmp_path: Path) -> None:
    """Transposed; transformers, which is the reference here as well, has written them as they are."""
    hub = Path(shutil.copytree(directory(shape), tmp_path / "hub"))

    def transpose(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if ".mlp.experts." in name:
                tensors[name] = tensors[name].transpose(1, 2).contiguous()

    edit_weights(hub, transpose)
    configs = [ModelConfig(model=each, device="cpu", attention_backend="torch") for each in (directory(shape), hub)]
    first, second = (load_model(config).model for config in configs)
    for layer, other in zip(first.layers, second.layers, strict=True):
        if isinstance(layer.mlp, SparseMLP):
            for name in ("gate_up", "down"):
                pairs = zip(
                    getattr(layer.mlp.experts, name).layers, getattr(other.mlp.experts, name).layers, strict=True
                )
                assert all(torch.equal(one.weight, two.weight) for one, two in pairs)
    if shape == "experts":  # transformers looks at one tensor at a time, which may have the same shape transposed
        check(hub, (("a", 1),))


@pytest.mark.interpreter
def test_triton_kernels_see_in_the_interpreter(directory: Directory) -> None:
    """Few tokens, for a program takes milliseconds there."""
    pytest.importorskip("triton")
    check(directory(), (("d", "d"),), budget=7, attention_backend="triton")


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_transformers(directory: Directory, dtype: str, backend: str) -> None:
    reference, half = Theirs(directory()), Theirs(directory())
    half.model = theirs(directory(), getattr(torch, dtype)).eval()
    errors, usual = [], []
    for prompt, found in of_engine(directory(), dtype=dtype, attention_backend=backend):
        exact = of_prompt(reference.logits(prompt), prompt)
        errors.append((found - exact).abs().mean())
        usual.append((of_prompt(half.logits(prompt), prompt) - exact).abs().mean())
    assert sum(map(float, errors)) < 1.2 * sum(map(float, usual))


def test_a_step_without_pictures_is_a_step_of_m3(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations, so also the same cost: every row from m3's table, and nothing between the layers."""
    config = PagedConfig(model=directory(), device="cpu", attention_backend="torch")
    loaded, text = load_model(config), tokens_of(12, 9)
    assert isinstance(loaded.model, Qwen3VLDecoder)
    asked: list[Tensor] = []
    read = RotaryTable.__call__
    monkeypatch.setattr(RotaryTable, "__call__", lambda table, given: asked.append(given) or read(table, given))
    monkeypatch.setattr(loaded.model.mrope, "gather", None)
    ours = Paged(loaded).step({"a": text})["a"]
    monkeypatch.setattr(Qwen3VLDecoder, "forward", Decoder.forward)
    assert torch.equal(Paged(loaded).step({"a": text})["a"], ours)
    assert [given.tolist() for given in asked] == [list(range(9))] * 2
