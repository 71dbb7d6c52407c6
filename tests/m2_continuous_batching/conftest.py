"""What m2's engine tests share: engines of both executions around the tiny random model."""

from collections.abc import Iterator

import pytest

import m2_continuous_batching
from m1_single_request.model_loader import LoadedModel
from tests.m2_continuous_batching.engines import EXECUTIONS
from tests.support.engines import EngineMaker, MakeEngine


@pytest.fixture
def make_engine(loaded_m1: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., scheduler_config=..., ...)`: an engine that shares the loaded model."""
    maker = EngineMaker(m2_continuous_batching, loaded_m1)
    yield maker
    maker.check()


@pytest.fixture(params=EXECUTIONS)
def execution(request: pytest.FixtureRequest) -> str:
    """Both ways to run a batch."""
    return str(request.param)
