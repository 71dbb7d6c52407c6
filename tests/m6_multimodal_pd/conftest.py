"""What m6's engine tests share: a tiny random model that sees, transformers' answers, conversations as prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import m6_multimodal_pd
from m1_single_request.model_loader import LoadedModel as LoadedTextModel
from m6_multimodal_pd import ModelConfig
from m6_multimodal_pd.disaggregation.runtime.credentials import write_keys
from m6_multimodal_pd.model_loader import LoadedModel, load_model
from tests.m5_chunked_prefill_spec.conftest import save_noisy
from tests.m6_multimodal_pd.engines import MakeEngine, setting
from tests.m6_multimodal_pd.seeing import BOOK, AloneInTheirs, Theirs, save_seeing_model
from tests.m6_multimodal_pd.vl_models import TEXT
from tests.support.engines import EngineMaker


@pytest.fixture(scope="session")
def seeing_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL with processors and chat template."""
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def loaded(seeing_directory: Path) -> LoadedModel:
    """The same, loaded once for all engines."""
    config = m6_multimodal_pd.ModelConfig(model=seeing_directory, device="cpu", dtype="float32")
    return load_model(config)


@pytest.fixture(scope="session")
def their_model(seeing_directory: Path) -> Theirs:
    """The same in the hands of transformers."""
    return Theirs(seeing_directory)


@pytest.fixture(scope="session")
def loaded_reader(
    their_model: Theirs, seeing_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoadedTextModel:
    """The language model of the one that sees, a little wrong: a draft model for its texts."""
    directory = tmp_path_factory.mktemp("reader")
    tokenizer = AutoTokenizer.from_pretrained(seeing_directory)
    rope = {"rope_type": "default", "rope_theta": TEXT["rope_parameters"]["rope_theta"]}
    named = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True}
    reader = Qwen3ForCausalLM(Qwen3Config(**TEXT | named | {"rope_parameters": rope})).to(torch.float32)
    language = their_model.model.model.language_model
    missing, unexpected = reader.model.load_state_dict(language.state_dict(), strict=False)
    assert not missing and not unexpected
    save_noisy(reader, tokenizer, directory)
    return load_model(ModelConfig(model=directory, device="cpu", dtype="float32"))


@pytest.fixture
def alone(their_model: Theirs, book: None) -> AloneInTheirs:
    """Their answer to one request."""
    return AloneInTheirs(their_model)


@pytest.fixture(scope="session")
def book(loaded: LoadedModel) -> None:
    """Conversations can be made prompts of."""
    if BOOK.make is None:
        engine: Any = EngineMaker(m6_multimodal_pd, loaded)(**setting(debug=False))
        BOOK.make = engine.chat_prompt


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., **setting(...))`: an engine that shares the loaded model."""
    maker = EngineMaker(m6_multimodal_pd, loaded)
    yield maker
    maker.check()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with the keys of a group."""
    write_keys(tmp_path / "group.json")
    return tmp_path / "group.json"


@pytest.fixture
def engine(make_engine: MakeEngine) -> Any:
    """A fresh engine with the default limits."""
    return make_engine(**setting())
