"""A small checkpoint of random weights, and ways to damage a copy of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.equivalence.models import save_random_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3."""
    return save_random_model(tmp_path_factory.mktemp("saved"), "qwen3")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(directory: Path, *, without: tuple[str, ...] = (), **values: Any) -> None:
    """Change some values of config.json and remove others."""
    path = directory / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(config | values))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
