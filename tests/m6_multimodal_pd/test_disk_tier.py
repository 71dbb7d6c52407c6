"""The disk tier below an engine with images, other weights, and overlapped steps."""

import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import m6_multimodal_pd
from m1_single_request.errors import EngineDeadError, EngineError, ModelLoadError
from m6_multimodal_pd import LLMEngine, ModelConfig
from tests.m4_radix_cache.test_disk_engines import PARTS, check_host_is_free, open_threads, until_written
from tests.m6_multimodal_pd.engines import MakeEngine, greedy, setting
from tests.m6_multimodal_pd.seeing import Theirs, asking, messages
from tests.m6_multimodal_pd.test_weight_loader import cut_now, failing
from tests.support.checkpoints import edit_weights
from tests.support.engines import EngineMaker


def over(directory: Path, **more: Any) -> dict[str, Any]:
    defaults = {"host_memory_bytes": 2**23, "prefetch_policy": "wait_complete", "page_size": 4}
    return setting(**{**defaults, **more}, disk_path=directory)


def test_only_what_stands_before_an_image_is_on_the_disk(
    make_engine: MakeEngine, their_model: Theirs, tmp_path: Path
) -> None:
    conversation, next_turn = messages((("a", 1),)), messages((("a", 1), (2,)))
    for wanted in (False, True):
        with make_engine(PARTS, **over(tmp_path)) as engine:
            prompt: Any = engine.chat_prompt(conversation)
            start = int(prompt.multimodal_inputs.mm_items[0].start)
            for each in (conversation, next_turn):
                output = engine.chat(each, greedy(8))
                assert output.token_ids == their_model.answer(engine.chat_prompt(each)).token_ids[:8]
            assert engine.stats().num_disk_hit_tokens == (start // 4 * 4 if wanted else 0)
    assert len(list(tmp_path.glob("*.safetensors"))) == start // 4


def test_other_weights_find_nothing_and_the_first_ones_everything(seeing_directory: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    shutil.copytree(seeing_directory, others)
    (file,) = others.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    prompt = asking(1, 2, 3)
    config = ModelConfig(model=seeing_directory, device="cpu", dtype="float32")
    with LLMEngine(model_config=config, parts=PARTS, **over(tmp_path / "kv")) as engine:
        hits = []
        for model in (None, others, None, seeing_directory, others):
            if model is not None:
                engine.update_weights(str(model))
            elif hits:
                engine.flush_cache()
                until_written(engine)
            before = engine.stats().num_disk_hit_tokens
            engine.generate(engine.chat_prompt(prompt), greedy(4))
            hits.append(engine.stats().num_disk_hit_tokens - before)
        assert [bool(number) for number in hits] == [False, False, True, True, True]


def test_weights_are_exchanged_although_the_directory_is_gone(
    seeing_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new tier is opened before anything changes: an engine without its tier would write nowhere for ever."""
    config = ModelConfig(model=seeing_directory, device="cpu", dtype="float32")
    directory = tmp_path / "kv"
    with LLMEngine(model_config=config, parts=PARTS, **over(directory)) as engine:
        prompt = engine.chat_prompt(asking(1, 2))
        wanted = engine.generate(prompt, greedy(4)).token_ids
        until_written(engine)
        shutil.rmtree(directory)
        directory.write_text("a file now")
        with pytest.raises(EngineError, match="disk_path"):
            engine.update_weights(str(seeing_directory))
        assert engine.generate(prompt, greedy(4)).token_ids == wanted
        check_host_is_free(engine)
        directory.unlink()
        engine.update_weights(str(seeing_directory))
        assert engine.generate(prompt, greedy(4)).token_ids == wanted
    with LLMEngine(model_config=config, parts=PARTS, **over(directory)) as engine:
        engine.generate(prompt, greedy(4))
        assert engine.stats().num_disk_hit_tokens


def test_weights_of_before_that_were_changed_have_another_name(
    seeing_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange that fails reads them again, as they are on the disk now."""
    first, second = (Path(shutil.copytree(seeing_directory, tmp_path / name)) for name in ("first", "second"))
    config = ModelConfig(model=first, device="cpu", dtype="float32")
    settings = over(tmp_path / "kv")
    with LLMEngine(model_config=config, parts=PARTS, **settings) as engine:
        prompt = engine.chat_prompt(asking(1, 2, 3))
        old = engine.generate(prompt, greedy(8)).token_ids
        until_written(engine)
        edit_weights(first, louder)
        failing(monkeypatch, cut_now)
        with pytest.raises(ModelLoadError, match="was loaded again"):
            engine.update_weights(str(second))
        monkeypatch.undo()
        new = engine.generate(prompt, greedy(8)).token_ids
        assert new != old and not engine.stats().num_disk_hit_tokens
    with LLMEngine(model_config=config, parts=PARTS, **settings) as engine:
        assert engine.generate(prompt, greedy(8)).token_ids == new and engine.stats().num_disk_hit_tokens


def louder(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.mul_(1.5)


def test_a_dead_engine_keeps_no_thread(seeing_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(seeing_directory, tmp_path / "model"))

    def fail(files: Any) -> None:
        shutil.rmtree(model)
        raise OSError("it is gone")

    before = set(threading.enumerate())
    config = ModelConfig(model=model, device="cpu", dtype="float32")
    with LLMEngine(model_config=config, parts=PARTS, **over(tmp_path / "kv")) as engine:
        failing(monkeypatch, fail)
        with pytest.raises(EngineDeadError):
            engine.update_weights(str(seeing_directory))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_threads_end_with_an_engine_that_nobody_has_closed(loaded: Any, tmp_path: Path, overlap: bool) -> None:
    before = set(threading.enumerate())
    maker = EngineMaker(m6_multimodal_pd, loaded)
    engine = maker(PARTS, **over(tmp_path, enable_overlap=overlap))
    engine.add_request(engine.chat_prompt(asking(1, 2, 3)), greedy(5))
    for _ in range(3):
        engine.step()
    own = set(threading.enumerate()) - before
    assert len(own) + len(open_threads()) >= 3
    maker.engines.clear()
    del engine
    gc.collect()
    for thread in own:
        thread.join(5)
    assert not own & set(threading.enumerate()) and not open_threads()
