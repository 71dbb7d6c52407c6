"""Weights: every tensor of the files in its place, and one clear error for every way in which they do not fit."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from m3_paged_attention import ForwardError, LLMEngine, ModelConfig, SamplingParams
from m3_paged_attention.attention import native_library
from m3_paged_attention.models.architecture import MODEL_TYPES, DecoderConfig, decoder_config
from m3_paged_attention.models.weights import (
    WEIGHT_FILES,
    DecoderWeights,
    allocate,
    dummy_weights,
    load_weights,
    places,
    read_headers,
)
from tests.equivalence.models import ARCHITECTURES, save_random_model
from tests.m3_paged_attention.checkpoints import edit_config, edit_weights
from tests.support.checkpoints import refusal_of

CPU, META = torch.device("cpu"), torch.device("meta")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shape_of(directory: Path) -> DecoderConfig:
    config = AutoConfig.from_pretrained(directory)
    architecture = config.architectures[0]
    return decoder_config(str(directory), architecture, config, model_type=MODEL_TYPES[architecture])


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    headers = read_headers(str(directory), directory)
    return load_weights(str(directory), headers, shape_of(directory), dtype, CPU)


refusal = partial(refusal_of, load)


def split_up(directory: Path, num_shards: int = 3) -> dict[str, str]:
    """Bring the weights into several files; returns the index's map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    for number, name in enumerate(sorted(tensors)):
        shards[number % num_shards][name] = tensors[name]
    names = [f"model-{number + 1:05}-of-{num_shards:05}.safetensors" for number in range(num_shards)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    write_index(directory, {"metadata": {}, "weight_map": weight_map})
    return weight_map


def write_index(directory: Path, content: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def same(one: DecoderWeights, other: DecoderWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


# --- what loads -------------------------------------------------------------------------------------------------------

OPTIONS = {"qwen3": {"attention_bias": True}, "qwen2": {}, "llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_on_the_way(saved: Path, dtype: torch.dtype) -> None:
    found = places(shape_of(saved), load(saved, dtype))
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_files_beside_the_model_are_not_read(directory: Path) -> None:
    whole = load(directory)
    save_file({"other": torch.zeros(2)}, directory / "consolidated.safetensors")
    assert same(load(directory), whole)
    split_up(directory)
    assert same(load(directory), whole)


def test_only_files_that_are_read_are_fetched_from_a_hub() -> None:
    beside = ["consolidated.safetensors", "pytorch_model.bin", "original/model.pth", "model.gguf"]
    read = ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    assert list(filter_repo_objects(read + beside, allow_patterns=list(WEIGHT_FILES))) == read


def test_a_tied_output_layer_is_the_embedding(saved: Path, tmp_path: Path) -> None:
    tied = load(saved)
    assert tied.head is tied.embedding
    untied = load(save_random_model(tmp_path, "qwen3", tie_word_embeddings=False))
    assert not torch.equal(untied.head, untied.embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_output_layer_may_be_stored_again(directory: Path, dtype: torch.dtype) -> None:
    edit_weights(directory, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    loaded = load(directory, dtype)
    assert loaded.head is loaded.embedding


@pytest.mark.parametrize("row", [0, 4999])
def test_a_tied_output_layer_of_its_own_is_refused(tmp_path: Path, row: int) -> None:
    directory = save_random_model(tmp_path, "qwen3", vocab_size=5000)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][row, 0] += 1

    edit_weights(directory, change)
    assert f"{HEAD} and {EMBEDDING} differ" in refusal(directory)
    edit_weights(directory, lambda tensors: tensors.update({HEAD: torch.zeros(2, 2)}))
    assert "differ" in refusal(directory)


def test_frequencies_in_old_checkpoints_are_passed_over(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda tensors: tensors.update({name: torch.zeros(12)}))
    load(directory)


def test_nothing_is_held_twice(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    directory = save_random_model(tmp_path, "llama", hidden_size=256, intermediate_size=4096, num_hidden_layers=4)
    before = anonymous_bytes()
    weights = load(directory)
    held = sum(tensor.nbytes for tensor in weights.tensors())
    assert held > 50_000_000
    assert anonymous_bytes() - before < 1.2 * held


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


# --- what does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"the weights lack {Q_PROJ};"),
        (lambda tensors: tensors.pop(EMBEDDING), f"the weights lack {EMBEDDING};"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "the weights have unexpected extra;"),
        (
            lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 5)}),
            f"the weights have other shapes for {Q_PROJ} [3, 5] instead of [96, 64] in model",
        ),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.contiguous()}), "[64, 96] instead of [96, 64]"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ][None]}), "[1, 96, 64] instead of [96, 64]"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]], " and 6 more"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)}), f"{Q_PROJ} is stored as I8"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}), "is stored as F8_E4M3"),
    ],
    ids="missing,no embedding,unexpected,misshapen,transposed,too deep,many,integers,eight bits".split(","),
)
@pytest.mark.parametrize("shards", [0, 3])
def test_tensors_that_do_not_fit_are_named(
    directory: Path, change: Callable[..., Any], message: str, shards: int
) -> None:
    edit_weights(directory, change)
    if shards:
        split_up(directory, shards)
    assert message in refusal(directory)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bias_that_the_config_does_not_name_is_unexpected(architecture: str, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, architecture)
    name = "model.layers.1.self_attn.o_proj.bias"
    edit_weights(directory, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert f"have unexpected {name}" in refusal(directory)


@pytest.mark.parametrize(
    "values",
    [{"vocab_size": 10**9}, {"num_hidden_layers": 20, "layer_types": None}, {"intermediate_size": 10**9}],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused_before_anything_is_allocated(
    directory: Path, values: dict[str, Any]
) -> None:
    edit_config(directory, **values)
    assert "the files do not fit config.json" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
@pytest.mark.parametrize("shards", [0, 2])
def test_a_file_that_is_cut_off_is_named(directory: Path, keep: int, shards: int) -> None:
    if shards:
        split_up(directory, shards)
    file = sorted(directory.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(directory)
    assert f"its weights cannot be loaded: {file.name}: " in message


def test_neither_file_nor_index_is_said(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(directory)


def test_an_index_that_names_an_absent_file_is_refused(directory: Path) -> None:
    split_up(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "names 'model-00002-of-00003.safetensors', which is missing" in refusal(directory)


@pytest.mark.parametrize("shard", ["../beside.safetensors", "/etc/passwd", "weights.bin", ""], ids=repr)
def test_an_index_may_only_name_safetensors_beside_it(directory: Path, shard: Any) -> None:
    weight_map = split_up(directory)
    save_file({Q_PROJ: torch.zeros(96, 64)}, directory.parent / "beside.safetensors")
    write_index(directory, {"weight_map": weight_map | {Q_PROJ: shard}})
    assert f"names {shard!r}, which is no .safetensors file beside it" in refusal(directory)


@pytest.mark.parametrize("shard", [3, None, ["a"]], ids=repr)
def test_an_index_of_other_things_than_names_is_refused(directory: Path, shard: Any) -> None:
    weight_map = split_up(directory)
    write_index(directory, {"weight_map": weight_map | {Q_PROJ: shard}})
    assert "model.safetensors.index.json cannot be read" in refusal(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weight_map": 3}', b"\xff\xfe\x00", b"{}"], ids=repr)
def test_an_index_that_is_broken_is_named(directory: Path, content: bytes) -> None:
    split_up(directory)
    (directory / "model.safetensors.index.json").write_bytes(content)
    assert "model.safetensors.index.json cannot be read" in refusal(directory)


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    weight_map = split_up(directory)
    other = directory / next(file for file in weight_map.values() if file != weight_map[Q_PROJ])
    tensors = load_file(other)
    save_file(tensors | {Q_PROJ: torch.zeros(96, 64)}, other)
    assert f"{Q_PROJ} is in both" in refusal(directory)


# --- weights without files --------------------------------------------------------------------------------------------


def test_dummy_weights_leave_the_global_generator_alone(saved: Path) -> None:
    state = torch.get_rng_state()
    dummy_weights(shape_of(saved), torch.float32, CPU, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_those_of_a_model_before_its_training(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = save_random_model(tmp_path, architecture, initializer_range=0.05, **OPTIONS[architecture])
    shape = shape_of(directory)
    for name, tensor in places(shape, dummy_weights(shape, dtype, CPU, seed=0)).items():
        assert tensor.dtype == dtype
        if name.endswith("bias"):
            assert not tensor.any()
        elif "norm" in name:
            assert bool((tensor == 1).all())
        else:
            assert abs(float(tensor.float().std()) - 0.05) < 0.005 and abs(float(tensor.float().mean())) < 0.005, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_has_a_place_and_only_one(architecture: str, tmp_path: Path) -> None:
    shape = shape_of(save_random_model(tmp_path, architecture, **OPTIONS[architecture]))
    weights = allocate(shape, torch.float32, CPU)
    for number, tensor in enumerate(places(shape, weights).values()):
        tensor.fill_(number)
    written = sum(tensor.numel() for tensor in places(shape, allocate(shape, torch.float32, META)).values())
    assert written == sum(tensor.numel() for tensor in weights.tensors())
    for number, tensor in enumerate(places(shape, weights).values()):
        assert bool((tensor == number).all()), "no place overlaps another"


# --- weights that are no numbers --------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_nan_in_the_weights_of_attention_is_said_and_never_becomes_a_token(
    directory: Path, backend: Any, dtype: str, name: str
) -> None:
    """torch's attention makes zeros of NaN if a sequence is short and no mask is given."""
    if backend == "native" and native_library.obstacle() is not None:
        pytest.skip("no C++ compiler")
    weight = f"model.layers.1.self_attn.{name}.weight"
    edit_weights(directory, lambda tensors: tensors[weight][::7].fill_(torch.nan))
    config = ModelConfig(model=directory, device="cpu", dtype=dtype, attention_backend=backend)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLMEngine(model_config=config) as engine:
        for length in (1, 2, 3, 7, 8, 15, 16, 17, 40):  # alone: other paths are taken then
            output = engine.generate(list(range(5, 5 + length)), params)
            assert isinstance(output.error, ForwardError) and "NaN" in str(output.error)
            assert output.token_ids == (), length


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_keys_that_become_nan_later_are_said_in_the_next_decode(directory: Path, backend: Any) -> None:
    if backend == "native" and native_library.obstacle() is not None:
        pytest.skip("no C++ compiler")
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for lengths in ([1], [3], [2, 2], [1, 3, 7], [20]):
        with LLMEngine(model_config=ModelConfig(model=directory, device="cpu", attention_backend=backend)) as engine:
            ids = [engine.add_request(list(range(5, 5 + length)), params) for length in lengths]
            engine.step()
            kv = engine.engine_core.executor.worker.model_runner.kv
            with torch.inference_mode():
                kv.layer(1).key_cache.fill_(torch.nan)
            outputs = engine.step()
            assert all("NaN" in str(outputs[request_id].error) for request_id in ids), lengths
