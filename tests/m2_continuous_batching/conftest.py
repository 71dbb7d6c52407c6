"""What m2's engine tests share: one tiny random model, engines of both executions around it, and m1's answers."""

from collections.abc import Iterator

import pytest

import m2_continuous_batching
from m1_single_request.model_loader import LoadedModel
from m2_continuous_batching import LLMEngine
from tests.m2_continuous_batching.engines import EXECUTIONS, MakeEngine
from tests.support.engines import EngineMaker, load_tiny_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded_m1(loaded: LoadedModel) -> LoadedModel:
    """The model whose answers are the ones to give."""
    return loaded


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., scheduler_config=..., ...)`: an engine that shares the loaded model."""
    maker = EngineMaker(m2_continuous_batching, loaded)
    yield maker
    maker.check()


@pytest.fixture(params=EXECUTIONS)
def execution(request: pytest.FixtureRequest) -> str:
    """Both ways to run a batch."""
    return str(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    """A fresh engine with the default limits."""
    return make_engine()
