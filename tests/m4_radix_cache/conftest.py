"""What m4's engine tests share: one tiny random model, engines around it, and m1's answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import m4_radix_cache
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.model_loader import load_model
from tests.m4_radix_cache.engines import CACHES, MakeEngine, check_memory
from tests.support.engines import EngineMaker


@pytest.fixture(scope="session")
def loaded(tiny_directory: Path) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_model(m4_radix_cache.ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m4_radix_cache, loaded)
    yield maker
    maker.check()
    for engine in maker.engines:
        check_memory(engine)


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    """Every prefix cache."""
    return str(request.param)
