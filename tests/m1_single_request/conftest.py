"""What m1's engine tests share: one tiny random model, and engines around it that cost nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import m1_single_request
from m1_single_request import LLMEngine
from m1_single_request.model_loader import LoadedModel
from tests.m1_single_request.engines import MakeEngine
from tests.support.engines import EngineMaker, load_tiny_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model_dir(loaded: LoadedModel) -> Path:
    """The tiny model's directory."""
    return Path(loaded.name)


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., ...)`: an engine that shares the loaded model, changed as the keywords say."""
    maker = EngineMaker(m1_single_request, loaded)
    yield maker
    maker.check()


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    """A fresh engine on the tiny model."""
    return make_engine()
