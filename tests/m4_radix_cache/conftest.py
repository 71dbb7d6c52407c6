"""What m4's engine tests share: engines around the tiny random model."""

from collections.abc import Iterator

import pytest

import m4_radix_cache
from m1_single_request.model_loader import LoadedModel
from tests.m4_radix_cache.engines import CACHES, MakeEngine, check_memory
from tests.support.engines import EngineMaker


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m4_radix_cache, loaded)
    yield maker
    maker.check(check_memory)


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    """Every prefix cache."""
    return str(request.param)
