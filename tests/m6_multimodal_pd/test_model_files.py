"""Files of a model directory with a value of another kind in any field: they load, or one line says what is wrong."""

import copy
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL, ModelLoadError
from m3_paged_attention.config import ModelConfig
from m6_multimodal_pd.config import DEFAULT_MODEL, MultimodalConfig
from m6_multimodal_pd.model_loader import describe_model, language_of
from m6_multimodal_pd.multimodal.processor_settings import read_settings
from tests.support.odd_values import about, answer_to

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
IMAGE_FILE, VIDEO_FILE, BOTH_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def copied(model: Path, directory: Path) -> Path:
    """A model directory without its weights, to be changed."""
    return Path(shutil.copytree(model, directory / "model", ignore=shutil.ignore_patterns("*.safetensors", "*.png")))


TOKENIZER = cache(AutoTokenizer.from_pretrained)


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it is the slow part, and it is the same in all directories."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: TOKENIZER(str(DEFAULT_MODEL)))


def read(directory: Path) -> None:
    """Everything but the weights, as a group's router does."""
    described = describe_model(ModelConfig(model=directory, device="cpu", dtype="float32", load_format="dummy"))
    if language_of(described) is not None:
        read_settings(str(directory), MultimodalConfig(), described.config.vision_config)


def edit(file: Path, place: tuple[str, ...], value: Any) -> None:
    """Put a value in a place of a JSON file."""
    content = json.loads(file.read_text()) if file.exists() else {}
    part = content
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    file.write_text(json.dumps(content))


WRONG: list[tuple[str, str, Any, str]] = [
    (IMAGE_FILE, "patch_size", "16", "'16'"),
    (IMAGE_FILE, "temporal_patch_size", [2], "[2]"),
    (IMAGE_FILE, "image_mean", "grey", "'grey'"),
    (IMAGE_FILE, "image_mean", [0.5, 0.5, 10**400], "[0.5, 0.5, 1000"),
    (VIDEO_FILE, "image_mean", [float("nan")] * 3, "[nan, nan, nan]"),
    (VIDEO_FILE, "fps", 10**400, "10000"),
    ("config.json", "text_config", 7, "7"),
    ("config.json", "model_type", "qwen3_vl_moe", "'qwen3_vl_moe'"),
]


@pytest.mark.parametrize(("file", "field", "value", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_another_kind_is_named_with_file_and_field(
    tmp_path: Path, file: str, field: str, value: Any, said: str
) -> None:
    directory = copied(DEFAULT_MODEL, tmp_path)
    edit(directory / file, (field,), value)
    with pytest.raises(ModelLoadError) as refused:
        read(directory)
    message = str(refused.value)
    assert all(part in message for part in (str(directory), file.removesuffix(".json"), field, said)) or (
        file == "config.json" and "its config cannot be loaded" in message and field in message
    ), message


def test_what_both_processors_files_hold_is_named_by_their_own_name(tmp_path: Path) -> None:
    directory = copied(DEFAULT_MODEL, tmp_path)
    image = json.loads((directory / IMAGE_FILE).read_text())
    for key in ("image_processor", "video_processor"):
        (directory / BOTH_FILE).write_text(json.dumps({key: image | {"patch_size": "16"}}))
        with pytest.raises(ModelLoadError, match=f"patch_size='16' in {BOTH_FILE}"):
            read(directory)


def test_a_text_model_that_names_an_architecture_that_sees_is_refused(tmp_path: Path) -> None:
    directory = copied(TEXT_MODEL, tmp_path)
    edit(directory / "config.json", ("architectures",), [ARCHITECTURE])
    with pytest.raises(ModelLoadError, match=f"config.json names the architecture {ARCHITECTURE} but .*'qwen3'"):
        read(directory)


VALUES: list[Any] = [None, True, -1, 0, 1.5, float("nan"), 10**30, "x", "\ud800", "y" * 5000, [], [1, 2], ["x"] * 3]
VALUES += [[float("nan")] * 3, [10**400] * 3, {}, {"a": 1}, "16"]
MORE = ("quantization_config", "rope_scaling", "layer_types", "sliding_window", "attention_bias", "text_config")
MODEL_TYPES = "qwen2 qwen3 llama qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_vl_text qwen3_moe bert clip t5".split()


def places(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every field, those of fields included."""
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *inner) for inner in places(value))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [TEXT_MODEL, DEFAULT_MODEL], ids=["text", "sees"])
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_any_value_in_any_field_of_any_file(tmp_path: Path, model: Path) -> None:
    directory = copied(model, tmp_path)
    for name in ("config.json", "generation_config.json", IMAGE_FILE, VIDEO_FILE):
        file = directory / name
        if not file.exists():
            continue
        original = json.loads(file.read_text())
        for place in [*places(original), *((field,) for field in MORE)]:
            for value in [*VALUES, *(MODEL_TYPES if place[-1] == "model_type" else ())]:
                file.write_text(json.dumps(copy.deepcopy(original)))
                with about(name, ".".join(place), repr(value)[:50]):
                    edit(file, place, value)
                    answer_to(lambda: read(directory))
        file.write_text(json.dumps(original))
