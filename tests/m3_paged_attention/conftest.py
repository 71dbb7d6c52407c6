"""What m3's engine tests share: engines around the tiny random model."""

from collections.abc import Iterator

import pytest

import m3_paged_attention
from m1_single_request.model_loader import LoadedModel
from tests.m3_paged_attention.checkpoints import directory as directory, saved as saved
from tests.m3_paged_attention.engines import MODES, MakeEngine, check_memory
from tests.support.engines import EngineMaker


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m3_paged_attention, loaded)
    yield maker
    maker.check(check_memory)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Both ways to preempt."""
    return str(request.param)
