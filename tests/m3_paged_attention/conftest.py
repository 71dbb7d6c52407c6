"""What m3's engine tests share: one tiny random model, engines around it, and m1's answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import m3_paged_attention
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention import LLMEngine
from m3_paged_attention.model_loader import load_model
from tests.m3_paged_attention.checkpoints import directory as directory, saved as saved
from tests.m3_paged_attention.engines import MODES, MakeEngine, check_memory
from tests.support.engines import EngineMaker


@pytest.fixture(scope="session")
def loaded(tiny_directory: Path) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_model(m3_paged_attention.ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m3_paged_attention, loaded)
    yield maker
    maker.check()
    for engine in maker.engines:
        check_memory(engine)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Both ways to preempt."""
    return str(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    """A fresh engine with the default limits."""
    return make_engine()
