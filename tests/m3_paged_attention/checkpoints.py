"""A small checkpoint of random weights, and ways to damage a copy of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.models import save_random_model
from tests.support.checkpoints import edit_json, edit_weights as edit_weights


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3."""
    return save_random_model(tmp_path_factory.mktemp("saved"), "qwen3")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(directory: Path, **changes: Any) -> None:
    """Change or remove values of config.json, as `edit_json`."""
    edit_json(directory / "config.json", **changes)
