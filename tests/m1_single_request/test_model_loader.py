"""Loading: which directories are models, and one clear error with what to do for each that is not."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as hf_logging

from m1_single_request import ConfigError, LLMEngine, ModelConfig, ModelLoadError, SamplingParams, model_loader
from m1_single_request.model_loader import SUPPORTED_ARCHITECTURES, LoadedModel, load_model
from tests.equivalence.models import ARCHITECTURES, save_random_model
from tests.m1_single_request.engines import MAX_MODEL_LEN, greedy
from tests.support.checkpoints import edit_json, edit_weights, refusal_of


@pytest.fixture
def directory(tiny_directory: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_directory, tmp_path / "model"))


def load(model: Any, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(**{"model": model, "device": "cpu"} | settings))


refusal = partial(refusal_of, load)


# --- what loads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_supported_architecture_loads(architecture: str, tmp_path: Path) -> None:
    loaded = load(save_random_model(tmp_path, architecture))
    config = loaded.model.config
    assert type(loaded.model).__name__ in SUPPORTED_ARCHITECTURES
    assert loaded.dtype == next(loaded.model.parameters()).dtype == torch.float32
    assert loaded.vocab_size == config.vocab_size == loaded.model.get_input_embeddings().num_embeddings
    head_dim = {"qwen3": 24, "qwen2": 16, "llama": 32}[architecture]
    assert loaded.kv_bytes_per_token == 2 * 2 * config.num_key_value_heads * head_dim * 4
    assert not loaded.model.training


def test_a_directory_may_be_named_in_every_form(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_directory.parent)
    for name in (
        tiny_directory,
        str(tiny_directory),
        f"{tiny_directory}/",
        tiny_directory.name,
        Path(tiny_directory.name),
    ):
        assert load(name).max_model_len == MAX_MODEL_LEN
    monkeypatch.chdir(tiny_directory.parents[1])
    assert load(f"{tiny_directory.parent.name}/{tiny_directory.name}").max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_cpu(tiny_directory: Path, dtype: str) -> None:
    config = ModelConfig(model=tiny_directory, device="cpu", dtype=dtype)
    with LLMEngine(model_config=config) as engine:
        runner = engine.engine_core.model_runner
        assert next(runner.model.parameters()).dtype == getattr(torch, dtype)
        assert runner.kv_bytes_per_token * 2 == load(tiny_directory).kv_bytes_per_token
        assert engine.generate([5, 6], greedy(4)).finish_reason == "length"


def test_weights_in_several_files_load(directory: Path) -> None:
    whole = load(directory)
    (directory / "model.safetensors").unlink()
    whole.model.save_pretrained(directory, max_shard_size="300KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    for name, tensor in load(directory).model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name])


def test_tied_and_untied_embeddings_load(tmp_path: Path) -> None:
    for tied in (True, False):
        model = load(save_random_model(tmp_path / str(tied), "qwen3", tie_word_embeddings=tied)).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_loading_prints_nothing_and_leaves_no_settings_behind(
    directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[logging.LogRecord] = []
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", logged.append)
    hf_logging.add_handler(listener)
    hf_logging.enable_progress_bar()
    verbosity = hf_logging.get_verbosity()
    capfd.readouterr()
    load(directory)
    edit_weights(directory, lambda tensors: tensors.pop("model.norm.weight"))
    refusal(directory)
    hf_logging.remove_handler(listener)
    assert capfd.readouterr() == ("", "") and not logged
    assert hf_logging.is_progress_bar_enabled() and hf_logging.get_verbosity() == verbosity


# --- length and end of sequence ---------------------------------------------------------------------------------------


def test_the_length_limit_is_the_models_or_less(tiny_directory: Path) -> None:
    assert load(tiny_directory).max_model_len == MAX_MODEL_LEN
    assert load(tiny_directory, max_model_len=10).max_model_len == 10
    assert load(tiny_directory, max_model_len=MAX_MODEL_LEN).max_model_len == MAX_MODEL_LEN
    with pytest.raises(ConfigError, match=f"max_model_len={MAX_MODEL_LEN + 1}.*{MAX_MODEL_LEN}"):
        load(tiny_directory, max_model_len=MAX_MODEL_LEN + 1)


def test_the_ends_of_sequence_are_a_union(directory: Path) -> None:
    tokenizers_own = load(directory).tokenizer.eos_token_id
    edit_json(directory / "config.json", eos_token_id=7)
    edit_json(directory / "generation_config.json", eos_token_id=[8, 9])
    assert load(directory).eos_token_ids == {7, 8, 9, tokenizers_own}
    edit_json(directory / "config.json", eos_token_id=[7, 10])
    edit_json(directory / "generation_config.json", eos_token_id=9)
    assert load(directory).eos_token_ids == {7, 9, 10, tokenizers_own}
    edit_json(directory / "config.json", eos_token_id=None)
    (directory / "generation_config.json").unlink()
    assert load(directory).eos_token_ids == {tokenizers_own}


@pytest.mark.parametrize("eos", [4096, 99999, -1])
def test_an_end_of_sequence_outside_the_vocabulary_is_left_out(directory: Path, eos: int) -> None:
    edit_json(directory / "config.json", eos_token_id=eos)
    assert eos not in load(directory).eos_token_ids
    with LLMEngine(directory) as engine:
        assert engine.generate([5], greedy(3, ignore_eos=False, min_tokens=2)).error is None


# --- what is no model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "../no/where", "nowhere", "a/b/c", "~/nowhere"])
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    assert "does not exist: give a model directory, or a hub id" in refusal(name)


@pytest.mark.parametrize("name", ["a" * 3000, "owner/" + "m" * 200, "/" + "a/" * 2000], ids=["name", "id", "path"])
def test_a_long_name_of_nothing_is_shortened_and_never_looked_up(name: str) -> None:
    message = refusal(name)
    assert len(message) < 400 and name[-100:] in message and "hub id" in message and "taken for" not in message


def test_a_hub_id_without_a_network_fails_at_once() -> None:
    message = refusal("nobody/no-such-model")
    assert "taken for a hub id" in message and "connection" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is a file: give the directory"),
        (["config.json"], "has no config.json"),
        (["model.safetensors"], "has no .safetensors file"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer.json"),
        (["tokenizer.json"], "its tokenizer cannot be loaded"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_a_missing_file_is_named(directory: Path, names: list[str], message: str) -> None:
    for name in names:
        (directory / name).unlink()
    assert message in refusal(directory if names else directory / "config.json")


@pytest.mark.parametrize(
    "content", [b'{"broken": ', b"", b"\xff\xfe\x00", b"[]"], ids=["cut", "empty", "binary", "list"]
)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "its config"),
        ("generation_config.json", "its generation config"),
        ("tokenizer.json", "its tokenizer"),
        ("tokenizer_config.json", "its tokenizer"),
    ],
)
def test_a_broken_file_is_named(directory: Path, name: str, part: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    message = refusal(directory)
    assert f"{part} cannot be loaded: " in message
    assert message.endswith("check its files, or get them again")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_weights_that_are_cut_off_are_refused(directory: Path, keep: int) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "its weights cannot be loaded" in refusal(directory)


def test_a_pickle_is_never_read(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    message = refusal(directory)
    assert "no .safetensors file" in message and "save_pretrained" in message


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"the weights lack {Q_PROJ}"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "the weights have unexpected extra"),
        (lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 5)}), f"the weights have other shapes for {Q_PROJ}"),
        (lambda tensors: tensors.pop("lm_head.weight"), "the weights lack lm_head.weight"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]], " and 6 more"),
    ],
    ids=["missing", "unexpected", "misshapen", "no head", "many"],
)
def test_tensors_that_do_not_fit_are_named(directory: Path, change: Callable[..., Any], message: str) -> None:
    edit_weights(directory, change)
    refused = refusal(directory)
    assert message in refused
    assert "do not fit config.json" in refused


CONFIGS: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, "other shapes") for name, value in {"vocab_size": 4000, "intermediate_size": 65}.items()],
    ({"num_attention_heads": 2}, "other shapes"),
    ({"hidden_size": "wide"}, "its config cannot be loaded: .*hidden_size"),
    ({"eos_token_id": "x"}, "its config cannot be loaded: .*eos_token_id"),
    ({"num_hidden_layers": 7}, "its config cannot be loaded: .*num_hidden_layers"),
    *[({"max_position_embeddings": number}, "max_position_embeddings") for number in (-5, 0, 1)],
    *[
        ({"architectures": names}, "is not supported; supported are")
        for names in (None, [], ["Qwen3Model"], ["Qwen3MoeForCausalLM"])
    ],
    ({"model_type": "martian"}, "martian"),
]


@pytest.mark.parametrize(("values", "message"), CONFIGS, ids=str)
def test_a_config_that_cannot_be_loaded_is_refused(directory: Path, values: dict[str, Any], message: str) -> None:
    edit_json(directory / "config.json", **values)
    assert re.search(message, refusal(directory))


# --- architectures and code that is not ours --------------------------------------------------------------------------


def test_another_architecture_is_refused_with_those_that_are_supported(directory: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8)).save_pretrained(directory)
    message = refusal(directory)
    assert "architecture 'GPT2LMHeadModel' is not supported" in message
    assert all(name in message for name in SUPPORTED_ARCHITECTURES)


EVIL = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import Qwen3Config, Qwen3ForCausalLM, PreTrainedTokenizerFast
class Config(Qwen3Config): model_type = "martian"
class Model(Qwen3ForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("model_type", ["qwen3", "martian"])
def test_code_beside_the_weights_is_never_run(directory: Path, tmp_path: Path, model_type: str) -> None:
    marker = tmp_path / "was here"
    (directory / "evil.py").write_text(EVIL.format(marker=str(marker)))
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(directory / "config.json", model_type=model_type, auto_map=auto_map)
    edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
    if model_type == "qwen3":  # a type that transformers knows: its own class is used
        with LLMEngine(directory) as engine:
            assert engine.generate([5], greedy(2)).finished
    else:
        assert "its config cannot be loaded" in refusal(directory)
    assert not marker.exists()


@pytest.mark.parametrize("eos", ["foo", [None], [3, "x"], [[1]], True, {"a": 1}], ids=repr)
def test_an_end_of_sequence_that_is_no_token_id_is_refused(directory: Path, eos: Any) -> None:
    edit_json(directory / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelLoadError):
        load(directory)


SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("value", [0, 10**30])
@pytest.mark.parametrize("field", [*SIZES, "head_dim"])
def test_a_size_that_none_can_be_is_named(directory: Path, family: str, field: str, value: int) -> None:
    """`head_dim` follows from hidden size and heads in Qwen2."""
    config = json.loads((directory / "config.json").read_text()) | {"architectures": [family]}
    config |= {"model_type": family[:5].lower(), field: value}
    if family == "Qwen2ForCausalLM" and field != "head_dim":
        del config["head_dim"]
    if field == "num_hidden_layers":
        del config["layer_types"]
    (directory / "config.json").write_text(json.dumps(config))
    assert f"{field}={value}" in refusal(directory)


@pytest.mark.parametrize("value", ["8", None, float("nan"), True], ids=repr)
@pytest.mark.parametrize("field", [*SIZES, "max_position_embeddings"])
def test_a_size_that_is_no_whole_number_is_named_even_where_transformers_lets_it_pass(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    """Its older releases read what they find."""
    config = AutoConfig.from_pretrained(tiny_directory)
    vars(config)[field] = value
    monkeypatch.setattr(model_loader.AutoConfig, "from_pretrained", lambda *args, **settings: config)
    assert f"{field}={value!r} is not valid" in refusal(tiny_directory)


def test_an_adapter_is_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    assert "merge it into its base model" in refusal(directory)


@pytest.mark.parametrize("settings", [{"attn_implementation": "paged|eager"}, {"return_dict": False}], ids=str)
def test_the_config_does_not_choose_how_the_model_runs(directory: Path, settings: dict[str, Any]) -> None:
    edit_json(directory / "config.json", **settings)
    with LLMEngine(directory) as engine:
        assert engine.generate([5, 6], SamplingParams(max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_weights_that_are_stored_as_other_than_real_numbers_are_refused(directory: Path, dtype: torch.dtype) -> None:
    """Converted, they would be another model."""
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = refusal(directory)
    assert f"{name} is stored as " in message and "give the original weights" in message
