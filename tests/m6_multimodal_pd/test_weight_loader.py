"""New weights in the model that runs: every tensor where it was, one of them in memory beside it, all or none."""

import gc
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_step import NativeStep
from m3_paged_attention.models.layers import MLP
from m6_multimodal_pd import (
    CacheConfig,
    ConfigError,
    DisaggregationConfig,
    EngineDeadError,
    EngineUsageError,
    LLMEngine,
    ModelConfig,
    ModelLoadError,
    weight_loader,
)
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.model_loader import load_model
from m6_multimodal_pd.tensor_files import TensorFiles
from tests.equivalence.models import save_random_model
from tests.m6_multimodal_pd.engines import greedy, runner_of
from tests.m6_multimodal_pd.seeing import save_seeing_model
from tests.support.checkpoints import edit_json, edit_weights

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++"))]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""With layers that are large enough to be packed by oneDNN."""


def made(model: Path, backend: Any = "auto", dtype: Any = "float32", **more: Any) -> LLMEngine:
    config = ModelConfig(model=model, device="cpu", dtype=dtype, attention_backend=backend, **more.pop("settings", {}))
    return LLMEngine(model_config=config, cache_config=CacheConfig(page_size=4, max_total_tokens=512), **more)


def answer(engine: LLMEngine) -> tuple[int, ...]:
    return engine.generate(PROMPT, greedy(8)).token_ids


def tensors_in(part: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model and of the objects in it, with the path to each, but not its backend, and not memory in
    which a layer works."""
    if isinstance(part, Tensor):
        yield path, part
    elif isinstance(part, torch.nn.Module):
        yield from ((f"{path}.{name}", tensor) for name, tensor in part.state_dict().items())
    elif isinstance(part, Mapping | list | tuple):
        values = part.items() if isinstance(part, Mapping) else enumerate(part)
        for key, value in values:
            yield from tensors_in(value, f"{path}.{key}")
    elif type(part).__module__.startswith(("m3_", "m6_")):
        slots = {name: getattr(part, name) for name in getattr(type(part), "__slots__", ())}
        own = {**getattr(part, "__dict__", {}), **slots}
        yield from tensors_in(
            {name: value for name, value in own.items() if name not in ("backend", "_logits", "_work")}, path
        )


def weights_of(engine: LLMEngine) -> dict[str, Tensor]:
    parts = {"model": runner_of(engine).model, "tower": engine.engine_core.encoder.tower}  # type: ignore[attr-defined]
    return dict(tensors_in(parts))


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: (tensor.to_dense() if tensor.is_mkldnn else tensor).clone() for path, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[path], other[path]) for path in one)


def addresses(engine: LLMEngine) -> dict[str, Any]:
    """Where every tensor is, and the pointers in the tables of the one-call step."""
    runner = runner_of(engine)
    found: dict[str, Any] = {
        path: tensor.data_ptr() for path, tensor in weights_of(engine).items() if not tensor.is_mkldnn
    }
    kv = [runner.kv.layer(index) for index in range(len(runner.model.layers))]
    found |= {f"kv{path}": tensor.data_ptr() for path, tensor in tensors_in(kv)}
    step = runner.kv.step
    if isinstance(step, NativeStep):
        table = step.table
        found["layers"] = bytes(step._layers)
        found["step"] = [table.embedding, table.norm, table.cos, table.sin, table.layers]
    return found


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": False, **WIDE}),
        ("qwen2", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", {}),
    ],
    ids=["tied", "untied", "biases", "more biases", "experts"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_that_of_a_new_engine_and_where_it_was(
    architecture: str, options: Any, backend: str, dtype: str, tmp_path: Path
) -> None:
    one, other = (save_random_model(tmp_path / str(seed), architecture, seed=seed, **options) for seed in (1, 2))
    with made(other, backend, dtype) as engine:
        wanted, expected = values(weights_of(engine)), answer(engine)
    with made(one, backend, dtype) as engine:
        before, model, step = addresses(engine), runner_of(engine).model, runner_of(engine).kv.step
        assert answer(engine) != expected
        engine.update_weights(other)
        assert same(values(weights_of(engine)), wanted)
        assert addresses(engine) == before
        assert runner_of(engine).model is model and runner_of(engine).kv.step is step
        assert answer(engine) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": False}), ("qwen3_moe", {})],
    ids=["tied", "untied", "experts"],
)
def test_quantized_weights_are_quantized_again_where_they_were(
    architecture: str, options: Any, backend: str, tmp_path: Path
) -> None:
    one, other = (save_random_model(tmp_path / str(seed), architecture, seed=seed, **options) for seed in (1, 2))
    int8: Any = {"settings": {"quantization": "int8"}}
    with made(other, backend, **int8) as engine:
        wanted, expected = values(weights_of(engine)), answer(engine)
    with made(one, backend, **int8) as engine:
        before, was = addresses(engine), answer(engine)
        assert was != expected
        engine.update_weights(other)
        assert same(values(weights_of(engine)), wanted) and addresses(engine) == before
        assert answer(engine) == expected
        edit_weights(one, lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:1].clone()}))
        with pytest.raises(ModelLoadError, match="q_proj"):
            engine.update_weights(one)
        assert same(values(weights_of(engine)), wanted) and answer(engine) == expected


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random models that see, of one shape."""
    first = save_seeing_model(tmp_path_factory.mktemp("seeing"))
    other = Path(shutil.copytree(first, tmp_path_factory.mktemp("seeing") / "other"))
    rng = torch.Generator().manual_seed(1)
    edit_weights(
        other, lambda tensors: [tensor.add_(torch.randn(tensor.shape, generator=rng)) for tensor in tensors.values()]
    )
    return first, other


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_vision_tower_too(seeing: tuple[Path, Path], backend: str) -> None:
    with made(seeing[1], backend) as engine:
        wanted = values(weights_of(engine))
    with made(seeing[0], backend) as engine:
        before, tower = addresses(engine), engine.engine_core.encoder.tower  # type: ignore[attr-defined]
        engine.update_weights(seeing[1])
        assert same(values(weights_of(engine)), wanted) and addresses(engine) == before
        assert engine.engine_core.encoder.tower is tower  # type: ignore[attr-defined]


def test_several_files(tmp_path: Path) -> None:
    one, other = (save_random_model(tmp_path / str(seed), "qwen3", seed=seed) for seed in (1, 2))
    with made(other) as engine:
        expected = answer(engine)
    tensors, shards = load_file(other / "model.safetensors"), ("model-1.safetensors", "model-2.safetensors")
    weight_map = {name: shards[number % 2] for number, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, other / shard)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with made(one) as engine:
        engine.update_weights(other)
        assert answer(engine) == expected


def test_a_tensor_is_gone_before_the_next_one_is_read_and_no_second_model_is_made(
    seeing: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    usual = torch.from_numpy

    def read(array: Any) -> Tensor:
        assert all(each() is None for each in alive)
        tensor = usual(array)
        alive[:] = [weakref.ref(tensor)]
        return tensor

    with made(seeing[0]) as engine:
        monkeypatch.setattr(torch, "from_numpy", read)
        for name in ("m3_paged_attention.models.decoder.Decoder", "m6_multimodal_pd.models.vision.VisionTower"):
            monkeypatch.setattr(f"{name}.__init__", lambda *args, **kwargs: pytest.fail("a second model"))
        gc.disable()
        try:
            engine.update_weights(seeing[1])
        finally:
            gc.enable()
    assert alive


# --- what does not fit ------------------------------------------------------------------------------------------------


def cut_off(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def config_of(**values: Any) -> Any:
    return lambda directory: edit_json(directory / "config.json", **values)


def as_pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


MISFITS: dict[str, tuple[Any, str]] = {
    "a tensor less": (lambda path: edit_weights(path, lambda each: each.pop(Q_PROJ)), f"lack {Q_PROJ}"),
    "a shape": (lambda path: edit_weights(path, lambda each: each.update({Q_PROJ: torch.zeros(3, 5)})), Q_PROJ),
    "a type": (
        lambda path: edit_weights(path, lambda each: each.update({Q_PROJ: each[Q_PROJ].to(torch.int8)})),
        f"{Q_PROJ} is stored as I8",
    ),
    "a file that is cut off": (cut_off, "model.safetensors"),
    "no file": (lambda path: (path / "model.safetensors").unlink(), "no .safetensors file"),
    "a pipe, which nobody writes": (as_pipe, "no .safetensors file"),
    "another output layer though it is tied": (
        lambda path: edit_weights(path, lambda each: each.update({"lm_head.weight": torch.zeros(4000, 64)})),
        "lm_head.weight",
    ),
    "angles": (config_of(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "another rope than"),
    "an epsilon": (config_of(rms_norm_eps=0.25), "another rms_norm_eps than"),
    "an end": (config_of(eos_token_id=77), "another set of end-of-sequence ids than"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random models of one shape."""
    return (
        save_random_model(tmp_path_factory.mktemp("one"), "qwen3", seed=1),
        save_random_model(tmp_path_factory.mktemp("other"), "qwen3", seed=2),
    )


@pytest.fixture(scope="module")
def running(pair: tuple[Path, Path]) -> Iterator[LLMEngine]:
    """An engine for tests that leave its weights as they are."""
    with made(pair[0]) as engine:
        yield engine


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_found_before_anything_is_written(
    misfit: str, pair: tuple[Path, Path], running: LLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, named = MISFITS[misfit]
    damage(path := Path(shutil.copytree(pair[1], tmp_path / "damaged")))
    expected = answer(running)
    monkeypatch.setattr(TensorFiles, "copy", lambda *args: pytest.fail("a tensor was written"))
    with pytest.raises(ModelLoadError) as refused:
        running.update_weights(path)
    assert named in str(refused.value)
    output = running.generate(PROMPT, greedy(8))
    assert output.token_ids == expected and output.metrics.cached_tokens > 0, "not even the cache was flushed"


def test_other_words_do_not_fit(pair: tuple[Path, Path], running: LLMEngine, tmp_path: Path) -> None:
    path = Path(shutil.copytree(pair[1], tmp_path / "other words"))
    stored = json.loads((path / "tokenizer.json").read_text())
    words = stored["model"]["vocab"]
    first, second = list(words)[300:302]
    words[first], words[second] = words[second], words[first]
    (path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelLoadError, match="another vocabulary than"):
        running.update_weights(path)


def test_fewer_positions_than_the_engine_serves_do_not_fit(
    pair: tuple[Path, Path], running: LLMEngine, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(pair[1], tmp_path / "shorter"))
    edit_json(path / "config.json", max_position_embeddings=16)
    with pytest.raises(ConfigError, match="is more than the 16 positions"):
        running.update_weights(path)


# --- what cannot be exchanged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, DisaggregationConfig(transport="in_process")], ids=["one engine", "a group"])
def test_a_model_of_ones_own_loader_keeps_its_weights(group: Any, pair: tuple[Path, Path]) -> None:
    parts = {"model_loader": lambda config, kv_cache_dtype: load_model(config, kv_cache_dtype)}
    with made(pair[0], parts=parts, disaggregation_config=group) as engine:
        expected = answer(engine)
        with pytest.raises(EngineUsageError, match="model_loader of your own"):
            engine.update_weights(pair[1])
        assert answer(engine) == expected


def test_drawn_weights_are_not_in_files(pair: tuple[Path, Path]) -> None:
    with made(pair[0], settings={"load_format": "dummy"}) as engine, pytest.raises(EngineUsageError, match="dummy"):
        engine.update_weights(pair[1])


def test_a_layer_of_ones_own_is_not_overwritten(pair: tuple[Path, Path]) -> None:
    class Scaled(MLP):
        pass

    with made(pair[0]) as engine:
        runner_of(engine).model.layers[1].mlp.__class__ = Scaled
        with pytest.raises(EngineUsageError, match="a Scaled, whose weights no file overwrites"):
            engine.update_weights(pair[1])
        assert answer(engine)


# --- what fails in the middle -----------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, fail: Any, at: Sequence[int] = (9,)) -> None:
    """Call `fail(files)` before the tensors are read that have these numbers, of all updates."""
    usual, numbers = TensorFiles.copy, count()

    def copy(files: TensorFiles, name: str, target: Tensor) -> None:
        if next(numbers) in at:
            fail(files)
        usual(files, name, target)

    monkeypatch.setattr(TensorFiles, "copy", copy)


def cut_now(files: TensorFiles) -> None:
    """What a training job does that writes its next checkpoint over this one."""
    cut_off_at = min(header.file for header in files.headers.values())
    cut_off_at.write_bytes(cut_off_at.read_bytes()[:20_000])


def touched(files: TensorFiles) -> None:
    file = min(header.file for header in files.headers.values())
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")


@pytest.mark.parametrize("fail", [cut_now, touched], ids=["cut off", "written to"])
def test_files_that_change_while_they_are_read_leave_the_old_weights(
    fail: Any, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their path may have been relative to another folder."""
    path = Path(shutil.copytree(pair[1], tmp_path / "other"))
    monkeypatch.chdir(pair[0])
    with made(Path()) as engine:
        monkeypatch.chdir(path)
        before, expected = values(weights_of(engine)), answer(engine)
        failing(monkeypatch, fail)
        with pytest.raises(ModelLoadError, match=r"reading its weights failed: .* was loaded again") as failed:
            engine.update_weights(Path())
        assert isinstance(failed.value.__cause__, OSError) and str(failed.value).startswith(str(path))
        assert same(values(weights_of(engine)), before)
        output = engine.generate(PROMPT, greedy(8))
        assert output.token_ids == expected and output.metrics.cached_tokens == 0
        engine.update_weights(pair[1])
        assert answer(engine) != expected


def test_a_file_that_is_replaced_behind_its_check_is_not_read(
    pair: tuple[Path, Path], running: LLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors may be of other shapes and types."""
    path = Path(shutil.copytree(pair[1], tmp_path / "other"))
    usual, expected = weight_loader.read_headers, answer(running)

    def replaced(*args: Any, **options: Any) -> Any:
        headers = usual(*args, **options)
        edit_weights(path, lambda each: each.update({Q_PROJ: each[Q_PROJ].to(torch.float64)}))
        return headers

    monkeypatch.setattr(weight_loader, "read_headers", replaced)
    with pytest.raises(ModelLoadError, match="was changed while it was read"):
        running.update_weights(path)
    assert answer(running) == expected


def test_without_the_old_files_the_engine_is_dead(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(shutil.copytree(pair[0], tmp_path / "first"))

    def fail(files: TensorFiles) -> None:
        shutil.rmtree(first)
        raise OSError("the disk is gone")

    with made(first) as engine:
        failing(monkeypatch, fail)
        with pytest.raises(EngineDeadError, match=r"the disk is gone.*does not exist") as failed:
            engine.update_weights(pair[1])
        assert isinstance(failed.value.__cause__, OSError)
        with pytest.raises(EngineDeadError, match="accepts nothing"):
            engine.generate(PROMPT, greedy(8))


def test_an_interrupt_between_two_tensors_leaves_no_engine_with_both(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(files: TensorFiles) -> None:
        raise KeyboardInterrupt

    with made(pair[0]) as engine:
        failing(monkeypatch, fail)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(pair[1])
        with pytest.raises(EngineDeadError):
            engine.generate(PROMPT, greedy(8))


def test_of_a_group_the_engine_is_lost_that_has_parts_of_both(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(pair[0], disaggregation_config=DisaggregationConfig(transport="in_process")) as engine:
        router: Any = engine.engine_core.router  # type: ignore[attr-defined]
        of_prefill = len(load_file(pair[1] / "model.safetensors"))

        def fail(files: TensorFiles) -> None:
            raise OSError("the disk is gone")

        failing(monkeypatch, fail, at=(of_prefill + 5, of_prefill + 6))  # the new weights, and then the old ones
        with pytest.raises(EngineLostError, match="parts of both"):
            engine.update_weights(pair[1])
        assert "decode-0" not in router.members and "prefill-0" in router.members


def test_a_model_of_another_kind_does_not_fit(seeing: tuple[Path, Path]) -> None:
    with made(seeing[0]) as engine, pytest.raises(ModelLoadError, match="another architecture than"):
        engine.update_weights(TEXT_MODEL)
