"""What the contract's tests share: one tiny random model, every variant's engines around it, and m1's answers."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine_contract.crowd import Answers, MakeEngine, answers_of
from tests.engine_contract.variants import VARIANTS, Variant, each_of
from tests.support.engines import EngineMaker

variant = each_of(VARIANTS)
"""Every milestone with batches, in each of its ways to run them."""


@pytest.fixture(scope="session")
def load(tiny_directory: Path) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """`load(package, model_loader)`: the tiny model, loaded once by each loader."""

    @cache
    def loaded(package: Any, model_loader: Callable[[Any], Any]) -> Any:
        return model_loader(package.ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))

    return loaded


@pytest.fixture
def make_engine(variant: Variant, load: Callable[..., Any]) -> Iterator[MakeEngine]:
    """`make_engine(parts, seats=..., budget=..., room=..., ...)`: an engine of the variant, which may hold nothing in
    the end."""
    maker = EngineMaker(variant.package, load(variant.package, variant.part("model_loader")))

    def make(
        parts: Any = None, *, seats: int = 4, budget: int | None = None, room: int | None = None, **changes: Any
    ) -> Any:
        return maker({**variant.parts(), **(parts or {})}, **variant.limits(seats, budget, room), **changes)

    yield make
    maker.check()
    for engine in maker.engines:
        assert not list(variant.owners(engine)), "a closed engine holds something"


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """The answers to the crowd if nothing breaks or is interrupted."""
    return answers_of(make_m1)
