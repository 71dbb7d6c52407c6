"""What the engine's tests share: one tiny random model, and engines around it that cost nothing.

Every engine of `make_engine` is looked at again after its test: its queues must agree, and when its work is done or it
is closed nothing may be held.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import LLMEngine, ModelConfig
from m1_single_request.model_loader import LoadedModel, load_model
from tests.equivalence.models import save_random_model
from tests.m1_single_request.engines import MAX_MODEL_LEN, MakeEngine, held, unfinished


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights whose only end-of-sequence id is the tokenizer's."""
    return save_random_model(
        tmp_path_factory.mktemp("tiny"),
        "qwen3",
        stop_ids=(),
        hidden_size=32,
        intermediate_size=64,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_MODEL_LEN,
    )


@pytest.fixture(scope="session")
def loaded(model_dir: Path) -> LoadedModel:
    """The tiny model, loaded once for all engines."""
    return load_model(ModelConfig(model=model_dir, device="cpu", dtype="float32"))


@pytest.fixture
def make_engine(loaded: LoadedModel, model_dir: Path) -> Iterator[MakeEngine]:
    """`make_engine(parts, seed=..., ...)`: an engine that shares the loaded model, changed as the keywords say."""
    engines: list[LLMEngine] = []

    def make(
        parts: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_template: str | None = None,
        **configs: Any,
    ) -> LLMEngine:
        changes: dict[str, Any] = {"max_model_len": max_model_len or loaded.max_model_len}
        if eos_token_ids is not None:
            changes["eos_token_ids"] = frozenset(eos_token_ids)
        if chat_template is not None:
            changes["tokenizer"] = copy.deepcopy(loaded.tokenizer)
            changes["tokenizer"].chat_template = chat_template
        table = {"model_loader": lambda config: dataclasses.replace(loaded, **changes), **(parts or {})}
        model_config = ModelConfig(model=model_dir, device="cpu", dtype="float32", seed=seed)
        engines.append(LLMEngine(model_config=model_config, parts=table, **configs))
        return engines[-1]

    yield make
    for engine in engines:
        check_nothing_is_held(engine)


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    """A fresh engine on the tiny model."""
    return make_engine()


def check_nothing_is_held(engine: LLMEngine) -> None:
    """Let an engine end what a test left behind, then look whether anything stayed; closes it."""
    core = engine.engine_core
    core.scheduler.check_invariants()
    if core.dead is None and not engine._closed:
        for _ in unfinished(engine):
            engine.step()
            core.scheduler.check_invariants()
        assert not core.scheduler.requests
    if not core.scheduler.requests or engine._closed:
        assert held(engine) == 0
    engine.close()
    assert held(engine) == 0
