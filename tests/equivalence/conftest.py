"""The models that every milestone must answer for: the embedded checkpoint and a random one of each architecture."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from m1_single_request import DEFAULT_MODEL
from tests.equivalence.harness import Prompt, Reference, ReferenceModel
from tests.equivalence.models import save_random_model
from tests.equivalence.prompts import MAX_TOKENS, twenty_prompts


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferenceModel]:
    """`reference_model(name)`: one of `MODELS` in `models.py`, loaded once."""

    @cache
    def load(name: str) -> ReferenceModel:
        if name == "embedded":
            return ReferenceModel(Path(DEFAULT_MODEL))
        return ReferenceModel(save_random_model(tmp_path_factory.mktemp(name), name))

    return load


@pytest.fixture(scope="session")
def references(
    reference_model: Callable[[str], ReferenceModel],
) -> Callable[[str], tuple[list[Prompt], list[Reference]]]:
    """`references(name)`: the twenty prompts and what transformers answers with that model."""

    @cache
    def answer(name: str) -> tuple[list[Prompt], list[Reference]]:
        model = reference_model(name)
        prompts = twenty_prompts(model.tokenizer)
        return prompts, [model.answer(prompt, MAX_TOKENS) for prompt in prompts]

    return answer
