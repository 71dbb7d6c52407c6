"""What m1's engine tests share: engines around the tiny random model, which cost nothing."""

from collections.abc import Iterator

import pytest

import m1_single_request
from m1_single_request.model_loader import LoadedModel
from tests.support.engines import EngineMaker, MakeEngine


@pytest.fixture
def make_engine(loaded_m1: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., ...)`: an engine that shares the loaded model, changed by the keywords."""
    maker = EngineMaker(m1_single_request, loaded_m1)
    yield maker
    maker.check()
