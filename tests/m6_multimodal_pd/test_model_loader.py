"""Loading a model that sees: what loads, what is counted, and one clear error for what does not."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import m3_paged_attention.model_loader as m3_loader
from m1_single_request import ConfigError, ModelLoadError
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.models.architecture import MODEL_TYPES
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.weights import WEIGHT_FILES
from m6_multimodal_pd.model_loader import LoadedModel, language_of, load_model
from m6_multimodal_pd.models.qwen3_vl import FAMILIES, Qwen3VLDecoder
from tests.equivalence.models import ARCHITECTURES, save_random_model
from tests.m6_multimodal_pd.vl_models import TOKENS, picture, save_random_vl_model, theirs
from tests.support.checkpoints import edit_weights

PATCHES = "model.visual.patch_embed.proj.weight"
ARCHITECTURE = "Qwen3VLForConditionalGeneration"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_vl_model(tmp_path_factory.mktemp("vl_loader"))


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(model: Any, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(**{"model": model, "device": "cpu", "attention_backend": "torch"} | settings))


def refusal(model: Any, **settings: Any) -> str:
    """The one line that says why this model cannot be loaded."""
    with pytest.raises(ModelLoadError) as caught:
        load(model, **settings)
    message = str(caught.value)
    assert str(model) in message and "\n" not in message
    return message


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def edit_config(directory: Path, part: str | None = None, **values: Any) -> None:
    config = config_of(directory)
    (config[part] if part else config).update(values)
    (directory / "config.json").write_text(json.dumps(config))


# --- what loads -------------------------------------------------------------------------------------------------------


def test_what_is_said_of_a_model_is_what_its_files_say(saved: Path) -> None:
    loaded, reference, config = load(saved), theirs(saved), config_of(saved)
    assert (loaded.name, loaded.architecture) == (str(saved), ARCHITECTURE)
    assert isinstance(loaded.model, Qwen3VLDecoder) and loaded.vision is not None
    assert loaded.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert loaded.weight_bytes == 4 * loaded.num_parameters
    assert loaded.vision.num_parameters == sum(p.numel() for p in reference.model.visual.parameters())
    assert loaded.max_model_len == 1024 and loaded.vocab_size == config["text_config"]["vocab_size"]
    assert loaded.model.kv_cache_spec(1).bytes_per_token == 2 * 3 * 1 * 64 * 4
    assert loaded.tokenizer.convert_tokens_to_ids("<|image_pad|>") == config["image_token_id"]


def test_the_tokens_of_pictures_are_those_of_the_config(saved: Path) -> None:
    tokens, config = language_of(load(saved)).media_tokens, config_of(saved)
    assert tokens is not None
    assert {f"{name}_token_id": id_ for name, id_ in vars(tokens).items()} == {name: config[name] for name in TOKENS}


@pytest.mark.parametrize("part", [None, "text_config"])
def test_the_ends_of_text_are_all_that_are_named(directory: Path, part: str | None) -> None:
    """By the config and its part for text, by the generation config, by the tokenizer; not those that cannot come."""
    usual = load(directory)
    assert usual.eos_token_ids == {usual.tokenizer.eos_token_id, 61, 122}
    edit_config(directory, part, eos_token_id=[7, usual.vocab_size])
    assert load(directory).eos_token_ids == usual.eos_token_ids | {7}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tower_and_decoder_are_in_the_precision_that_was_asked_for(saved: Path, dtype: str) -> None:
    loaded, wanted = load(saved, dtype=dtype), getattr(torch, dtype)
    assert loaded.vision is not None
    assert loaded.dtype == loaded.model.dtype == loaded.vision.dtype == wanted
    assert loaded.vision.encode([picture(0, (1, 4, 4))])[0].dtype == wanted
    assert loaded.weight_bytes == wanted.itemsize * loaded.num_parameters
    assert loaded.model.rotary.cos.dtype == torch.float32


def test_positions_reach_as_far_as_a_request_may(saved: Path) -> None:
    assert load(saved, max_model_len=100).model.rotary.cos.shape[0] == 100
    with pytest.raises(ConfigError, match=r"max_model_len=1025.*1024"):
        load(saved, max_model_len=1025)


def test_the_older_form_of_the_rope_settings_is_read(directory: Path) -> None:
    """As the released checkpoints have it."""
    expected, config = load(directory).model, config_of(directory)
    settings = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}
    (directory / "config.json").write_text(json.dumps(config))
    found = load(directory).model
    assert isinstance(found, Qwen3VLDecoder) and isinstance(expected, Qwen3VLDecoder)
    assert torch.equal(found.rotary.cos, expected.rotary.cos)
    assert torch.equal(found.mrope.axes, expected.mrope.axes)


def test_of_a_hub_id_only_the_weights_are_fetched(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, commit = tmp_path / "models--someone--sees", "0" * 40
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    fetch = Mock(wraps=m3_loader.snapshot_download)
    monkeypatch.setattr(m3_loader, "snapshot_download", fetch)
    loaded, expected = load("someone/sees"), load(saved)
    fetch.assert_called_with("someone/sees", allow_patterns=list(WEIGHT_FILES))
    assert loaded.vision is not None and expected.vision is not None
    assert torch.equal(loaded.model.embedding, expected.model.embedding)
    items = [picture(0, (1, 4, 4))]
    assert torch.equal(loaded.vision.encode(items)[0], expected.vision.encode(items)[0])


# --- text models ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_text_model_is_what_m3_loads(architecture: str, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, architecture)
    config = ModelConfig(model=directory, device="cpu", attention_backend="torch")
    ours, wanted = load_model(config), m3_loader.load_model(config)
    assert type(ours.model) is Decoder
    assert ours.vision is None and language_of(ours) is None
    for name in vars(wanted).keys() - {"model", "tokenizer"}:
        assert getattr(ours, name) == getattr(wanted, name), name
    assert torch.equal(ours.model.embedding, wanted.model.embedding)


# --- weights without files --------------------------------------------------------------------------------------------


def test_dummy_weights_need_no_files_and_follow_from_the_seed(directory: Path) -> None:
    expected, items = load(directory), [picture(0, (1, 4, 4))]
    (directory / "model.safetensors").unlink()
    assert "has no .safetensors file" in refusal(directory)
    state = torch.random.get_rng_state()
    one, again, other = (load(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state), "other randomness is left alone"
    assert one.num_parameters == expected.num_parameters
    assert one.vision is not None and again.vision is not None and other.vision is not None
    assert torch.equal(one.model.embedding, again.model.embedding)
    assert torch.equal(one.vision.encode(items)[0], again.vision.encode(items)[0])
    assert not torch.equal(one.model.embedding, other.model.embedding)
    assert not torch.equal(one.vision.encode(items)[0], other.vision.encode(items)[0])


# --- what does not load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3OmniMoeForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_another_architecture_is_refused_with_all_that_are_supported(directory: Path, name: str) -> None:
    edit_config(directory, architectures=[name])
    message = refusal(directory)
    assert f"architecture '{name}' is not supported" in message
    assert all(supported in message for supported in (*MODEL_TYPES, *FAMILIES))


NONSENSE: list[tuple[str | None, dict[str, Any], str]] = [
    ("text_config", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("text_config", {"num_hidden_layers": 1}, "deepstack_visual_indexes=[0, 2] are more than the 1 layers"),
    ("text_config", {"hidden_size": 32}, "out_hidden_size=64 is not the language model's hidden_size=32"),
    ("text_config", {"head_dim": 128}, "mrope_section=[12, 10, 10] must be three whole numbers"),
    (None, {"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
    (None, {"image_token_id": 5000}, "image_token_id=5000 in config.json is no token: there are 4,096"),
    (None, {"video_token_id": -1}, "video_token_id=-1"),
    (None, {"vision_start_token_id": 3, "vision_end_token_id": 3}, "vision_end_token_id=3"),
    ("vision_config", {"out_hidden_size": 32}, "out_hidden_size=32 is not the language model's hidden_size=64"),
    ("vision_config", {"deepstack_visual_indexes": [0, 3]}, "deepstack_visual_indexes=[0, 3] must each be another"),
    ("vision_config", {"depth": 0}, "vision_config.depth=0 is not valid: Expected `int` >= 1"),
    ("vision_config", {"num_heads": 3}, "vision_config.hidden_size=32 over 3 heads"),
    ("vision_config", {"patch_size": [4, 4]}, "vision_config.patch_size=[4, 4]"),
    ("vision_config", {"hidden_act": "wiggle"}, "vision_config.hidden_act='wiggle' is not one of"),
    ("vision_config", {"model_type": "qwen2_vl_vision"}, "model_type|its config cannot be loaded"),
    ("text_config", {"model_type": "qwen3"}, "model_type='qwen3' where it must be 'qwen3_vl_text'"),
]


@pytest.mark.sample(10)
@pytest.mark.parametrize(("part", "values", "message"), NONSENSE, ids=str)
def test_a_config_that_makes_no_sense_is_named(
    directory: Path, part: str | None, values: dict[str, Any], message: str
) -> None:
    edit_config(directory, part, **values)
    for load_format in ("auto", "dummy"):
        said = refusal(directory, load_format=load_format)
        assert any(each in said for each in message.split("|")), said


TENSORS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda tensors: tensors.pop(PATCHES), f"the weights lack {PATCHES};"),
    (lambda tensors: tensors.update({PATCHES: torch.zeros(3)}), f"other shapes for {PATCHES} [3] instead of [32, 3,"),
    (lambda tensors: tensors.update({"model.visual.extra": torch.zeros(3)}), "have unexpected model.visual.extra"),
    (lambda tensors: tensors.update({"model.audio.weight": torch.zeros(3)}), "have unexpected model.audio.weight"),
    (lambda tensors: tensors.update({PATCHES: tensors[PATCHES].to(torch.int8)}), f"{PATCHES} is stored as I8"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("change", "message"), TENSORS, ids=[message for _, message in TENSORS])
def test_tensors_that_do_not_fit_are_named(
    directory: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    edit_weights(directory, change)
    said = refusal(directory)
    assert message in said
    assert load(directory, load_format="dummy").architecture == ARCHITECTURE, "nothing of the files is read then"


def test_files_that_are_broken_are_an_error_of_the_loader(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"x" * 100)
    assert "its weights cannot be loaded: model.safetensors: " in refusal(directory)


def test_a_tower_that_no_memory_holds_is_an_error_of_ours(directory: Path) -> None:
    edit_config(directory, "vision_config", intermediate_size=2**47)
    for load_format in ("dummy", "auto"):
        assert "its weights cannot be loaded: they need" in refusal(directory, load_format=load_format)


@pytest.mark.exhaustive  # a Python of its own
def test_an_engine_of_pictures_starts_without_the_slow_imports_of_transformers() -> None:
    script = (
        "import sys, m6_multimodal_pd as m6; m6.LLMEngine().generate('hello');"
        "sys.exit(sorted({'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
