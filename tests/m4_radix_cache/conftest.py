"""What m4's engine tests share: one tiny random model, engines around it, and m1's answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import m1_single_request
import m4_radix_cache
from m1_single_request.model_loader import load_model as load_m1
from m3_paged_attention.model_loader import LoadedModel, load_model
from m4_radix_cache import LLMEngine
from tests.m4_radix_cache.engines import CACHES, MakeEngine, Remembered, check_memory
from tests.support.engines import EngineMaker, save_tiny_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as files."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded(tiny_directory: Path) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_model(m4_radix_cache.ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def loaded_m1(tiny_directory: Path) -> Any:
    """The same model in transformers' hands, for the answers to give."""
    return load_m1(m1_single_request.ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m4_radix_cache, loaded)
    yield maker
    maker.check()
    for engine in maker.engines:
        check_memory(engine)


@pytest.fixture
def make_m1(loaded_m1: Any) -> Iterator[Any]:
    """The same for m1, whose answers are the ones to give."""
    maker = EngineMaker(m1_single_request, loaded_m1)
    yield maker
    maker.check()


@pytest.fixture(scope="session")
def m1(loaded_m1: Any) -> Remembered:
    """Gives the answers that are right to greedy and seeded requests."""
    return Remembered(EngineMaker(m1_single_request, loaded_m1)())


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    """Every prefix cache."""
    return str(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    """A fresh engine with the default limits."""
    return make_engine()
