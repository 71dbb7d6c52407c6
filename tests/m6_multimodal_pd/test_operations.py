"""What is done to an engine besides requests: weights are exchanged, steps are profiled; alone and in a group."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m6_multimodal_pd import (
    DEFAULT_MODEL,
    CacheConfig,
    ConfigError,
    DisaggregationConfig,
    EngineUsageError,
    LLMEngine,
    ModelLoadError,
    SamplingParams,
)
from m6_multimodal_pd.errors import EngineLostError, RemoteError
from m6_multimodal_pd.weight_loader import WeightLoader
from tests.m6_multimodal_pd.pd_engines import add, engine_of

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
PARAMS = SamplingParams(max_tokens=12)
GROUPS: list[DisaggregationConfig | None] = [None, DisaggregationConfig(transport="in_process")]
each_group = pytest.mark.parametrize("group", GROUPS, ids=["one engine", "a group"])


def made(group: DisaggregationConfig | None, model: Path | None = None, **parts: Any) -> LLMEngine:
    """An engine, or a group of them, with little memory."""
    memory = CacheConfig(page_size=4, max_total_tokens=512)
    return LLMEngine(model, cache_config=memory, disaggregation_config=group, parts=parts)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships, with other weights of the same shape."""
    path = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEFAULT_MODEL, path)
    rng = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=rng).to(tensor.dtype) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def answers(other_model: Path) -> tuple[str, str]:
    """What the model that ships says, and what the other one does."""
    said = []
    for model in (DEFAULT_MODEL, other_model):
        with made(None, model) as engine:
            said.append(engine.chat(QUESTION, PARAMS).text)
    assert said[0] != said[1]
    return said[0], said[1]


@pytest.mark.sample(1)
@each_group
def test_new_weights_answer_at_once_and_no_old_kv_is_used(
    group: Any, other_model: Path, answers: tuple[str, str]
) -> None:
    with made(group) as engine:
        assert engine.chat(QUESTION, PARAMS).text == answers[0]
        engine.update_weights(other_model)
        output = engine.chat(QUESTION, PARAMS)
        assert output.text == answers[1]
        assert output.metrics.cached_tokens == 0
        engine.update_weights(DEFAULT_MODEL)
        assert engine.chat(QUESTION, PARAMS).text == answers[0]


@pytest.mark.sample(1)
@each_group
def test_weights_are_not_exchanged_under_load(group: Any, other_model: Path, answers: tuple[str, str]) -> None:
    with made(group) as engine:
        engine.add_request(engine.chat_prompt(QUESTION), PARAMS, request_id="a")
        engine.step()
        with pytest.raises(EngineUsageError, match="some are unfinished"):
            engine.update_weights(other_model)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= engine.step()
        assert outputs["a"].text == answers[0]


def test_weights_that_do_not_fit_are_not_exchanged_and_put_back(tmp_path: Path, answers: tuple[str, str]) -> None:
    """So the files of the old ones may be gone, and the caches keep what they have."""
    first = Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "first"))
    with made(DisaggregationConfig(transport="in_process"), first) as engine:
        assert engine.chat(QUESTION, PARAMS).text == answers[0]
        shutil.rmtree(first)
        with pytest.raises(ModelLoadError, match=r"another .* than that of the model that runs"):
            engine.update_weights(TEXT_MODEL)
        output = engine.chat(QUESTION, PARAMS)
        assert output.text == answers[0] and output.metrics.cached_tokens > 0


def break_decode(engine: LLMEngine, phase: str, model: Path) -> Any:
    """The decode engine fails in this phase of loading a model. Return the router."""
    router: Any = engine.engine_core.router  # type: ignore[attr-defined]
    loader = router.links.engines["decode-0"].core.weight_loader
    usual = getattr(loader, phase)

    def broken(model_or_checkpoint: Any, *more: Any) -> Any:
        if str(model) in str(model_or_checkpoint):
            raise ModelLoadError("the disk is full")
        return usual(model_or_checkpoint, *more)

    setattr(loader, phase, broken)
    return router


@pytest.mark.parametrize("phase", ["check", "load"])
def test_if_one_engine_cannot_change_its_weights_none_does(
    phase: str, other_model: Path, answers: tuple[str, str]
) -> None:
    with made(DisaggregationConfig(transport="in_process")) as engine:
        router = break_decode(engine, phase, other_model)
        with pytest.raises(ModelLoadError, match="the disk is full"):
            engine.update_weights(other_model)
        assert engine.chat(QUESTION, PARAMS).text == answers[0] and len(router.members) == 2


def test_an_engine_that_has_the_new_weights_and_cannot_put_the_old_ones_back_is_lost(
    other_model: Path, tmp_path: Path
) -> None:
    """Else one engine would compute prompts with other weights than another one answers."""
    first = Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "first"))
    with made(DisaggregationConfig(transport="in_process"), first) as engine:
        router = break_decode(engine, "load", other_model)
        shutil.rmtree(first)
        with pytest.raises(ModelLoadError, match="the disk is full"):
            engine.update_weights(other_model)
        assert "prefill-0" not in router.members


def interrupt_at_listening(router: Any, monkeypatch: pytest.MonkeyPatch, *, verb: str, once: bool) -> None:
    """Ctrl-C when the router has listened for answers to a call, once or each time."""
    usual = router.listen

    def interrupted(timeout_s: float) -> None:
        is_called = any(verb in member.calls.values() for member in router.members.values())
        if is_called and once:
            monkeypatch.setattr(router, "listen", usual)
        usual(timeout_s)
        if is_called:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(router, "listen", interrupted)


@pytest.mark.parametrize("verb", ["check_weights", "update_weights"])
def test_an_interrupt_while_weights_are_exchanged_leaves_the_old_ones_on_all_engines(
    verb: str, other_model: Path, answers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(DisaggregationConfig(transport="in_process")) as engine:
        router: Any = engine.engine_core.router
        interrupt_at_listening(router, monkeypatch, verb=verb, once=True)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(other_model)
        assert router.weights is None and not any(member.calls for member in router.members.values())
        assert engine.chat(QUESTION, PARAMS).text == answers[0]


def test_engines_that_an_interrupt_keeps_from_going_back_to_the_old_weights_are_dropped(
    other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Ctrl-C in the update, one while it is undone."""
    with made(DisaggregationConfig(transport="in_process")) as engine:
        router: Any = engine.engine_core.router
        interrupt_at_listening(router, monkeypatch, verb="update_weights", once=False)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(other_model)
        monkeypatch.undo()
        assert not router.members
        assert isinstance(engine.chat(QUESTION, PARAMS).error, EngineLostError)


@pytest.mark.sample(1)
@each_group
def test_weights_may_be_exchanged_right_after_an_abort(group: Any, other_model: Path, answers: tuple[str, str]) -> None:
    with made(group) as engine:
        for num_steps, model, answer in ((1, other_model, 1), (3, DEFAULT_MODEL, 0)):
            rid = engine.add_request(engine.chat_prompt(QUESTION), PARAMS)
            for _ in range(num_steps):
                engine.step()
            engine.abort_request(rid)
            while engine.has_unfinished_requests():
                engine.step()
            engine.update_weights(model)
            assert engine.chat(QUESTION, PARAMS).text == answers[answer]


def test_an_engine_that_joins_after_an_exchange_has_the_new_weights(
    other_model: Path, answers: tuple[str, str]
) -> None:
    with made(DisaggregationConfig(transport="in_process")) as engine:
        engine.update_weights(other_model)
        links: Any = engine.engine_core.router.links  # type: ignore[attr-defined]
        shared = links.engines["prefill-0"].side.transport.segments
        for role in ("prefill", "decode"):
            links.drop(f"{role}-0", "for a test")
            add(links, f"{role}-0_1", partial(engine_of, role, engine.config, shared))
        assert engine.chat(QUESTION, PARAMS).text == answers[1]


@each_group
def test_a_profile_shows_the_operators_of_the_steps(group: Any, tmp_path: Path) -> None:
    with made(group) as engine:
        engine.start_profile(tmp_path / "profiles")
        with pytest.raises(EngineUsageError, match="already"):
            engine.start_profile(tmp_path)
        engine.chat(QUESTION, PARAMS)
        (path,) = engine.stop_profile()
        assert path.parent == tmp_path / "profiles"
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)
        with pytest.raises(EngineUsageError, match="no profile"):
            engine.stop_profile()


@each_group
def test_a_profile_that_cannot_be_written_is_an_error_and_no_name(group: Any, tmp_path: Path) -> None:
    with made(group) as engine:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            engine.start_profile(tmp_path / "file" / "folder")
        engine.start_profile(tmp_path / "profiles")
        (tmp_path / "profiles").rmdir()
        with pytest.raises(ConfigError, match=r"steps-.*cannot be written"):
            engine.stop_profile()
        engine.start_profile(tmp_path)
        (path,) = engine.stop_profile()
        assert path.is_file()


def test_a_profile_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's engines go on in the directory in which they were started."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with made(None) as engine:
        engine.start_profile("profiles")
        monkeypatch.chdir(tmp_path / "elsewhere")
        (path,) = engine.stop_profile()
    assert path.is_file() and path.parent == tmp_path / "profiles"


def test_what_an_operation_raises_is_its_answer_and_the_group_goes_on(
    answers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = WeightLoader.check

    def check(loader: WeightLoader, model: str) -> Any:
        if model == "/another":
            raise KeyError("no such file")
        return usual(loader, model)

    monkeypatch.setattr(WeightLoader, "check", check)
    with made(DisaggregationConfig(transport="in_process")) as engine:
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"KeyError.*prefill-0"):
                engine.update_weights("/another")
        assert engine.chat(QUESTION, PARAMS).text == answers[0]


def test_a_closed_engine_records_nothing(tmp_path: Path) -> None:
    engine = made(None)
    engine.start_profile(tmp_path)
    engine.close()
    assert list(tmp_path.iterdir()) == []
    with made(None) as another:  # the recording is over: another engine may record
        another.start_profile(tmp_path)
        another.stop_profile()
