"""What m5's engine tests share: one tiny random model, a draft model that often agrees with it, and m1's answers."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import m5_chunked_prefill_spec
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.model_loader import load_model
from tests.m4_radix_cache.conftest import cache as cache
from tests.m5_chunked_prefill_spec.engines import MakeEngine, check_memory
from tests.support.engines import EngineMaker

NOISE = 0.02  # on the weights of the draft model: so much that it often, and not always, agrees


@pytest.fixture(scope="session")
def draft_directory(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, a little wrong."""
    directory = tmp_path_factory.mktemp("draft")
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    return save_noisy(model, AutoTokenizer.from_pretrained(tiny_directory), directory)


def save_noisy(model: Any, tokenizer: Any, directory: Path) -> Path:
    """Save a model with a little noise on its weights; returns the directory."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def loaded_draft(draft_directory: Path) -> LoadedModel:
    """The draft model, loaded once."""
    return load_model(m5_chunked_prefill_spec.ModelConfig(model=draft_directory, device="cpu", dtype="float32"))


class PairMaker(EngineMaker):
    """Engines that share two loaded models: whoever asks for the draft model by its directory gets it."""

    def __init__(self, loaded: LoadedModel, draft: LoadedModel, package: ModuleType = m5_chunked_prefill_spec) -> None:
        super().__init__(package, loaded)
        self.draft = draft

    def model_of(self, config: Any) -> LoadedModel:
        return self.draft if str(config.model) == self.draft.name else self.loaded

    def __call__(self, parts: Any = None, **more: Any) -> Any:
        if more.get("speculative_config") and more["speculative_config"].method == "draft_model":
            given = more["speculative_config"]
            more["speculative_config"] = dataclasses.replace(given, model=given.model or self.draft.name)
        return super().__call__(parts, **more)


@pytest.fixture
def make_engine(loaded: LoadedModel, loaded_draft: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded models."""
    maker = PairMaker(loaded, loaded_draft)
    yield maker
    maker.check(check_memory)
