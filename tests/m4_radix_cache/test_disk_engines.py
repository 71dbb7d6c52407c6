"""Engines over one directory: what one has computed the next one finds, and nothing there gives a wrong token."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import m4_radix_cache
from m4_radix_cache import ConfigError, DiskError, EngineDeadError, LLMEngine, ModelConfig, ModelLoadError
from m4_radix_cache.mem_cache import disk_store, disk_tier
from m4_radix_cache.mem_cache.disk_files import is_temporary
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.disk_store import DiskResult, DiskStore
from m4_radix_cache.mem_cache.native_thread import NativeThread
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.engines import MakeEngine, Recorder, Remembered, cache_of, greedy, ids, setting, unfinished
from tests.support.engines import EngineMaker

PROMPT = ids(42)
PARAMS = greedy(6)


class SoonPrefetched(DiskRadixCache):
    """The disk is asked for few pages, too."""

    least_prefetched = 4


PARTS = {"disk_cache": SoonPrefetched}


def over(directory: Path, **more: Any) -> dict[str, Any]:
    """The settings of an engine over this directory."""
    defaults = {"tokens": 128, "host_memory_bytes": 2**22, "prefetch_policy": "wait_complete"}
    return setting(**{**defaults, **more}, disk_path=directory)


@pytest.fixture
def directory(make_engine: MakeEngine, m1: Remembered, tmp_path: Path) -> Path:
    """A directory in which an engine has left the KV of `PROMPT`."""
    directory = tmp_path / "kv"
    with make_engine(PARTS, **over(directory)) as engine:
        assert engine.generate(PROMPT, PARAMS).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        assert not engine.stats().num_disk_hit_tokens
    assert len(pages(directory)) == 11
    return directory


def pages(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def ask(engine: LLMEngine, m1: Remembered, **more: Any) -> tuple[int, Recorder]:
    """Ask for the same again; how many tokens came from the disk, and what happened."""
    recorder = Recorder(engine.engine_core.tracer)
    output = engine.generate(PROMPT, PARAMS, **more)
    assert output.error is None and output.token_ids == m1.generate(PROMPT, PARAMS).token_ids
    return engine.stats().num_disk_hit_tokens, recorder


# --- hits, and what is no hit -----------------------------------------------------------------------------------------


def test_a_second_engine_hits(make_engine: MakeEngine, m1: Remembered, directory: Path) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        num_tokens, recorder = ask(engine, m1)
        assert num_tokens == 40 == engine.stats().num_host_hit_tokens
        assert engine.stats().num_prompt_tokens == 2
        (found,) = recorder.events("prefetched")
        assert (found.asked, found.found, found.failure) == (40, 40, None)
        assert ask(engine, m1)[0] == 40  # from the device now


def flipped(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[-5] ^= 4
    files[0].write_bytes(content)


def truncated(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size - 1)


def exchanged(files: list[Path]) -> None:
    first, second = (file.read_bytes() for file in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def empty(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(b"")


def linked(files: list[Path]) -> None:
    files[0].rename(files[0].with_suffix(".other"))
    files[0].symlink_to(files[0].with_suffix(".other"))


def a_directory(files: list[Path]) -> None:
    files[0].unlink()
    files[0].mkdir()


DAMAGES = [flipped, truncated, exchanged, empty, linked, a_directory]


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_files_are_misses(
    make_engine: MakeEngine, m1: Remembered, directory: Path, damage: Callable[[list[Path]], None]
) -> None:
    in_order = chain_of(make_engine, directory)
    damage([in_order[4], in_order[1]])
    with make_engine(PARTS, **over(directory)) as engine:
        num_tokens, recorder = ask(engine, m1)
        assert num_tokens == (4 if damage in (exchanged, empty) else 16)
        (found,) = recorder.events("prefetched")
        assert found.found == num_tokens
        assert found.failure is not None
        assert ask(engine, m1)[0] == num_tokens
    hits = []
    for _ in range(2):  # what was read is written anew
        with make_engine(PARTS, **over(directory)) as engine:
            hits.append(ask(engine, m1)[0])
    assert hits[1] == (16 if damage is a_directory else 40)


def chain_of(make_engine: MakeEngine, directory: Path) -> list[Path]:
    """The files of the prompt's pages, in order."""
    with make_engine(PARTS, **over(directory)) as engine:
        store = cache_of(engine).disk.store  # type: ignore[attr-defined]
        digests = store.digests(store.root(None), RadixKey(PROMPT).data)
    return [directory / f"{digest.hex()}.safetensors" for digest in digests]


OTHERS: list[dict[str, Any]] = [{"page_size": 8}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}]


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_pages_of_another_layout_are_no_hits(make_engine: MakeEngine, directory: Path, other: dict[str, Any]) -> None:
    with make_engine(PARTS, **over(directory, **other)) as engine:
        engine.generate(PROMPT, PARAMS)
        assert engine.stats().num_disk_hit_tokens == 0
    assert len(pages(directory)) > 11
    with make_engine(PARTS, **over(directory, **other)) as engine:
        engine.generate(PROMPT, PARAMS)
        assert engine.stats().num_disk_hit_tokens


def test_namespaces_are_apart_on_the_disk(make_engine: MakeEngine, m1: Remembered, directory: Path) -> None:
    for wanted in (0, 40):
        with make_engine(PARTS, **over(directory)) as engine:
            assert ask(engine, m1, cache_salt="tenant")[0] == wanted


def test_other_weights_are_no_hits(
    make_engine: MakeEngine, directory: Path, tmp_path: Path, tiny_directory: Path
) -> None:
    """Of the same shape and under the same name."""
    moved = tmp_path / "model"
    shutil.copytree(tiny_directory, moved)

    def num_hits() -> int:
        config = ModelConfig(model=moved, device="cpu", dtype="float32")
        with LLMEngine(model_config=config, parts=PARTS, **over(directory)) as engine:
            engine.generate(PROMPT, PARAMS)
            return engine.stats().num_disk_hit_tokens

    assert num_hits() == 40  # the name is no part of the identity, the files are
    (file,) = moved.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert num_hits() == 0
    assert num_hits() == 40


@pytest.mark.parametrize("how", ["replaced", "written over", "config.json"])
def test_a_model_that_changes_while_it_is_loaded_is_refused(tiny_directory: Path, tmp_path: Path, how: str) -> None:
    """Its KV would get the name of the weights that lie there afterwards, and be wrong for everybody who has them."""
    model = tmp_path / "model"
    shutil.copytree(tiny_directory, model)
    changed = model / "config.json" if how == "config.json" else next(model.glob("*.safetensors"))

    def load(*arguments: Any, **more: Any) -> Any:
        loaded = m4_radix_cache.PARTS["model_loader"](*arguments, **more)
        content = bytearray(changed.read_bytes())
        content[-2] ^= 1 if how != "config.json" else 0
        target = model / "new" if how == "replaced" else changed
        target.write_bytes(content)
        target.rename(changed)
        return loaded

    config = ModelConfig(model=model, device="cpu", dtype="float32")
    with pytest.raises(ModelLoadError, match="was changed while the model was loaded: start again"):
        LLMEngine(model_config=config, parts={**PARTS, "model_loader": load}, **over(tmp_path / "kv"))
    assert not pages(tmp_path / "kv")
    with LLMEngine(model_config=config, parts={"model_loader": load}, **setting(host_memory_bytes=2**20)):
        pass  # without a disk nothing outlives the engine


def test_the_directory_may_be_that_of_the_model(tiny_directory: Path, tmp_path: Path) -> None:
    """Its pages are no weights."""
    model = tmp_path / "model"
    shutil.copytree(tiny_directory, model)
    model.chmod(0o755)
    config = ModelConfig(model=model, device="cpu", dtype="float32")
    for wanted in (0, 40):
        with LLMEngine(model_config=config, parts=PARTS, **over(model)) as engine:
            engine.generate(PROMPT, PARAMS)
            assert engine.stats().num_disk_hit_tokens == wanted
            assert wanted == 0 or engine.flush_cache("disk")
    with LLMEngine(model_config=config, **setting()) as engine:
        engine.generate(PROMPT, PARAMS)


def test_a_capacity_below_a_page_is_refused_before_anything_is_created(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_bytes=10 is less than one page"):
        make_engine(**over(tmp_path / "kv", disk_bytes=10))
    assert not (tmp_path / "kv").exists()


def test_a_flush_of_the_disk_is_not_for_ever(make_engine: MakeEngine, m1: Remembered, directory: Path) -> None:
    """What is in host memory is written again as soon as something below it is: without it, that is not found."""
    with make_engine(PARTS, **over(directory)) as engine:
        ask(engine, m1)
        assert engine.flush_cache("disk") and not pages(directory)
        until_written(engine)
        assert not pages(directory)
        longer = PROMPT + ids(12, 90)
        assert engine.generate(longer, PARAMS).token_ids == m1.generate(longer, PARAMS).token_ids
        assert engine.stats().num_disk_hit_tokens == 40, "the flush has not taken it from the device"
    with make_engine(PARTS, **over(directory)) as engine:
        assert engine.generate(longer, PARAMS).token_ids == m1.generate(longer, PARAMS).token_ids
        assert engine.stats().num_disk_hit_tokens == 52


def test_prompt_log_probabilities_take_nothing_from_the_disk(make_engine: MakeEngine, directory: Path) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        output = engine.generate(PROMPT, greedy(4, prompt_logprobs=1))
        assert output.prompt_logprobs is not None and engine.stats().num_disk_hit_tokens == 0


def test_several_outputs_share_what_the_disk_has(make_engine: MakeEngine, m1: Remembered, directory: Path) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        output = engine.generate(PROMPT, greedy(6, n=3))
        assert {tuple(each.token_ids) for each in output.outputs} == {tuple(m1.generate(PROMPT, PARAMS).token_ids)}
        assert engine.stats().num_disk_hit_tokens >= 40
    assert len(pages(directory)) == 11


# --- a disk that fails ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_once_and_costs_nothing_else(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with make_engine(PARTS, **over(tmp_path)) as engine:
        monkeypatch.setattr(disk_store, "write_file", full)
        recorder = Recorder(engine.engine_core.tracer)
        for first in (5, 60, 120):
            prompt = ids(20, first)
            assert engine.generate(prompt, PARAMS).token_ids == m1.generate(prompt, PARAMS).token_ids
            until_written(engine)
        (failed,) = recorder.events("disk_failed")
        assert failed.reason == "No space left on device"
        check_host_is_free(engine)


def test_a_directory_that_vanishes_costs_nothing_else(make_engine: MakeEngine, m1: Remembered, directory: Path) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        shutil.rmtree(directory)
        num_tokens, recorder = ask(engine, m1)
        assert num_tokens == 0
        ask(engine, m1)
        until_written(engine)
        engine.generate(ids(20, 90), PARAMS)
        assert len(recorder.events("disk_failed")) == 1
        check_host_is_free(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOMEM])
def test_files_that_cannot_be_read_are_misses(
    make_engine: MakeEngine, m1: Remembered, directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unreadable(*_: Any) -> bytes:
        raise OSError(code, "no")

    with make_engine(PARTS, **over(directory)) as engine:
        monkeypatch.setattr(disk_store, "read_file", unreadable)
        num_tokens, recorder = ask(engine, m1)
        (found,) = recorder.events("prefetched")
        assert num_tokens == 0 and found.failure == "no"
        check_host_is_free(engine)


def test_a_tier_whose_thread_meets_any_error_goes_on(
    make_engine: MakeEngine, m1: Remembered, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that nobody has thought of: the request must not wait for ever."""

    def breaks(*_: Any) -> Any:
        raise ValueError("a bug")

    with make_engine(PARTS, **over(directory)) as engine:
        monkeypatch.setattr(DiskStore, "read", breaks)
        monkeypatch.setattr(DiskStore, "write", breaks)
        num_tokens, recorder = ask(engine, m1)
        assert num_tokens == 0 and recorder.events("prefetched")[0].failure == "a bug"
        engine.generate(ids(20, 90), PARAMS)
        until_written(engine)
        check_host_is_free(engine)


def until_written(engine: LLMEngine) -> None:
    """Wait until the disk tier holds no page."""
    cache: Any = cache_of(engine)
    while cache._jobs:
        cache._acknowledge()
    for _ in range(5000):
        if not cache.host._held:
            return
        time.sleep(0.001)
    raise AssertionError("the disk tier does not end")


def check_host_is_free(engine: LLMEngine) -> None:
    """No page of the host is lost."""
    until_written(engine)
    assert engine.flush_cache()
    cache: Any = cache_of(engine)
    assert cache.host.available() == cache.host.num_pages == len(cache.host._free)


class LostJob(SimpleNamespace):
    """A load that has failed: what waits for it is told once, as by `CopyJob.copy`."""

    kind, error, nodes, rids, step, num_pages, seconds = "load", None, (), (), 0, 1, 1.0

    def wait(self) -> None:
        if not vars(self).pop("told", False):
            self.told = True
            raise EngineDeadError("KV cannot be copied from host memory")


@pytest.mark.parametrize("tier", ["host", None])
def test_a_load_that_is_lost_outside_a_step(make_engine: MakeEngine, tier: str | None) -> None:
    """Who keeps the KV must not use it; who discards all of it need not know."""
    with make_engine(**setting(host_memory_bytes=2**20)) as engine:
        engine.generate(PROMPT, PARAMS)
        cache: Any = cache_of(engine)
        while cache._jobs:
            cache._acknowledge()
        cache._jobs.append(LostJob())
        if tier is None:
            assert engine.flush_cache()
            assert engine.generate(PROMPT, PARAMS).error is None
            return
        with pytest.raises(EngineDeadError, match="cannot be copied"):
            engine.flush_cache(tier)
        with pytest.raises(EngineDeadError, match="accepts nothing"):
            engine.generate(PROMPT, PARAMS)


# --- several engines --------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_two_engines_use_a_directory_at_once(make_engine: MakeEngine, m1: Remembered, tmp_path: Path) -> None:
    settings = over(tmp_path, disk_bytes=120_000)
    prompts = [ids(30, 5 + 7 * number) for number in range(12)]
    with make_engine(PARTS, **settings) as one, make_engine(PARTS, **settings) as two:
        for number, prompt in enumerate([*prompts, *prompts]):
            for engine in (one, two) if number % 2 else (two, one):
                assert engine.generate(prompt, PARAMS).token_ids == m1.generate(prompt, PARAMS).token_ids
            until_written(one if number % 3 else two)
        assert one.stats().num_disk_hit_tokens and two.stats().num_disk_hit_tokens
    assert sum(file.stat().st_size for file in pages(tmp_path)) <= 120_000 * 9 // 8


PROGRAM = """
import sys
from itertools import count
from m4_radix_cache import LLMEngine, ModelConfig
from tests.m4_radix_cache.engines import greedy, ids, setting

settings = setting(tokens=128, host_memory_bytes=2**22, disk_path=sys.argv[2])
engine = LLMEngine(model_config=ModelConfig(model=sys.argv[1], device="cpu", dtype="float32"), **settings)
for number in count():
    engine.generate(ids(42, 5 + number % 40), greedy(6))
    print(number, flush=True)
"""


@pytest.mark.exhaustive
def test_engines_that_are_killed_leave_nothing_wrong(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path, tiny_directory: Path
) -> None:
    rng = Random(3)
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM, str(tiny_directory), str(tmp_path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        with make_engine(PARTS, **over(tmp_path)) as engine:
            assert not [file for file in tmp_path.iterdir() if is_temporary(file.name)]
            for first in range(5, 45):
                prompt = ids(42, first)
                output = engine.generate(prompt, PARAMS)
                assert output.token_ids == m1.generate(prompt, PARAMS).token_ids
            assert engine.stats().num_disk_hit_tokens
        for file in pages(tmp_path)[::2]:
            file.unlink()


# --- waiting ----------------------------------------------------------------------------------------------------------


class Gate:
    """A disk that is as slow as the test says, and a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.is_open, self.num_reads = 0.0, threading.Event(), 0
        read = DiskStore.read

        def gated(store: DiskStore, *arguments: Any) -> DiskResult:
            self.num_reads += 1
            assert self.is_open.wait(10)
            return read(store, *arguments)

        class Clock:
            monotonic = staticmethod(lambda: self.now)

        monkeypatch.setattr(DiskStore, "read", gated)
        monkeypatch.setattr(disk_tier, "time", Clock)
        monkeypatch.setattr("m4_radix_cache.mem_cache.disk_radix_cache.WAIT_S", 0.002)


@pytest.fixture
def gate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


def test_a_request_waits_no_longer_than_its_timeout(
    make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate
) -> None:
    """1 s, and 0.25 s more per 1,024 tokens."""
    with make_engine(PARTS, **over(directory, prefetch_policy="timeout")) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        assert engine.step() == {}
        gate.now = 1 + 40 * 0.25 / 1024
        for _ in range(3):
            assert engine.step() == {}, "it has not waited longer than it may"
        gate.now += 1e-6
        assert len(engine.step()["r"].token_ids) == 1
        gate.is_open.set()
        (output,) = [engine_output(engine)]
        assert output.token_ids == m1.generate(PROMPT, PARAMS).token_ids
        assert engine.stats().num_disk_hit_tokens == 0 and engine.stats().num_prompt_tokens == 42
        check_host_is_free(engine)


def engine_output(engine: LLMEngine) -> Any:
    return finished(engine)["r"]


def finished(engine: LLMEngine) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for _ in unfinished(engine):
        last |= engine.step()
    return last


def test_best_effort_does_not_wait(make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate) -> None:
    with make_engine(PARTS, **over(directory, prefetch_policy="best_effort")) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        assert len(engine.step()["r"].token_ids) == 1
        gate.is_open.set()
        assert engine_output(engine).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        check_host_is_free(engine)


def test_best_effort_takes_what_has_come_while_the_request_waited_for_a_place(
    make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate
) -> None:
    gate.is_open.set()
    with make_engine(PARTS, **over(directory, prefetch_policy="best_effort", max_num_seqs=1)) as engine:
        engine.add_request([7, 8, 9], greedy(8), request_id="other")
        engine.step()
        engine.add_request(PROMPT, PARAMS, request_id="r")
        for _ in range(3):
            engine.step()
        until_read(engine)
        assert finished(engine)["r"].token_ids == m1.generate(PROMPT, PARAMS).token_ids
        assert engine.stats().num_disk_hit_tokens == 40


def until_read(engine: LLMEngine) -> None:
    cache: Any = cache_of(engine)
    for prefetch in cache._prefetches.values():
        assert prefetch.has_ended.wait(10)


def test_wait_complete_waits_for_all(make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        gate.now = 1e6
        for _ in range(3):
            assert engine.step() == {}
        gate.is_open.set()
        assert engine_output(engine).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        assert engine.stats().num_disk_hit_tokens == 40


def test_what_is_computed_faster_is_not_asked_for(make_engine: MakeEngine, directory: Path, gate: Gate) -> None:
    """Below 256 tokens, by default; and never if host memory has no room beside what is in use."""
    assert DiskRadixCache.least_prefetched == 256
    least = type("Cache", (DiskRadixCache,), {"least_prefetched": 41})
    for parts, more in (({"disk_cache": least}, {}), (PARTS, {"host_memory_bytes": 2**14})):
        with make_engine(parts, **over(directory, **more)) as engine:
            engine.generate(PROMPT, PARAMS)
            assert gate.num_reads == 0


def test_a_request_that_waits_blocks_nobody(
    make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate
) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        engine.add_request([7, 8, 9], greedy(4), request_id="other")
        last: dict[str, Any] = {}
        for _ in range(6):
            last |= engine.step()
        assert last["other"].finished and last["other"].token_ids == m1.generate([7, 8, 9], greedy(4)).token_ids
        assert "r" not in last
        gate.is_open.set()
        assert engine_output(engine).token_ids == m1.generate(PROMPT, PARAMS).token_ids


def test_an_engine_that_only_waits_sleeps(
    make_engine: MakeEngine, directory: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m4_radix_cache.mem_cache.disk_radix_cache.WAIT_S", 0.05)
    with make_engine(PARTS, **over(directory)) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        began = time.process_time(), time.perf_counter()
        for _ in range(3):
            assert engine.step() == {}
        cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        assert wall > 0.14 and cpu < wall / 2
        gate.is_open.set()


@pytest.mark.parametrize("end", ["abort", "close", "flush after abort"])
def test_a_request_that_waits_can_end(make_engine: MakeEngine, directory: Path, gate: Gate, end: str) -> None:
    before = set(threading.enumerate())
    with make_engine(PARTS, **over(directory)) as engine:
        engine.add_request(PROMPT, PARAMS, request_id="r")
        engine.step()
        if end == "close":
            gate.is_open.set()
        else:
            assert engine.abort_request("r")
            assert engine.step()["r"].finish_reason == "abort" and not engine.has_unfinished_requests()
            if end != "abort":
                assert engine.flush_cache()
            engine.add_request(PROMPT, PARAMS, request_id="r")
            gate.is_open.set()
            engine_output(engine)
            assert engine.stats().num_disk_hit_tokens == 40
            check_host_is_free(engine)
    assert set(threading.enumerate()) <= before


def test_outputs_of_one_prompt_are_read_once(
    make_engine: MakeEngine, m1: Remembered, directory: Path, gate: Gate
) -> None:
    """All wait for the pages; one of them may end meanwhile."""
    room = 21 * page_bytes(make_engine)  # all prefetches together may take a half
    with make_engine(PARTS, **over(directory, host_memory_bytes=room)) as engine:
        recorder = Recorder(engine.engine_core.tracer)
        for rid in ("first", "second", "third"):
            engine.add_request(PROMPT, PARAMS, request_id=rid)
        engine.step()
        assert engine.abort_request("first")
        engine.step()
        assert not engine.stats().num_prompt_tokens
        gate.is_open.set()
        outputs = finished(engine)
        assert {outputs[rid].token_ids for rid in ("second", "third")} == {m1.generate(PROMPT, PARAMS).token_ids}
        assert gate.num_reads == 10 and engine.stats().num_disk_hit_tokens == 40
        assert engine.stats().num_prompt_tokens == 4, "two of each that is answered"
        found = recorder.events("prefetched")
        assert [(event.rid, event.found, event.node is None) for event in found] == [
            ("second", 40, False), ("third", 40, True),
        ]  # fmt: skip
        check_host_is_free(engine)


def test_nobody_waits_long_for_a_disk_that_hangs(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush is an error and changes nothing; `close` returns."""
    goes_on = threading.Event()
    write = DiskStore.write
    monkeypatch.setattr(DiskStore, "write", lambda *arguments: goes_on.wait(10) and write(*arguments))
    monkeypatch.setattr(disk_tier, "HANG_S", 0.05)
    before = set(threading.enumerate())
    with make_engine(PARTS, **over(tmp_path)) as engine:
        assert engine.generate(PROMPT, PARAMS).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        with pytest.raises(DiskError, match="hangs: it is not flushed"):
            engine.flush_cache("disk")
        assert engine.generate(PROMPT, PARAMS).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    goes_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)


def test_nothing_waits_long_for_a_directory_that_hangs(
    make_engine: MakeEngine, m1: Remembered, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the look whether there are pages, which is given up once, nor a flush, nor `close` with all threads in
    calls that do not end."""
    goes_on, calls = threading.Event(), list[str]()

    def hanging(name: str) -> Callable[..., Any]:
        real = getattr(DiskStore, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            goes_on.wait(10)
            return real(*arguments)

        return call

    for name in ("contains", "clear", "write"):
        monkeypatch.setattr(DiskStore, name, hanging(name))
    monkeypatch.setattr(disk_tier, "HANG_S", 0.05)
    monkeypatch.setattr(disk_tier, "LOOK_S", 0.05)
    before = set(threading.enumerate())
    began = time.perf_counter()
    with make_engine(PARTS, **over(directory)) as engine:
        with pytest.raises(DiskError, match="hangs: it is flushed in part"):
            engine.flush_cache("disk")
        for first in (5, 60):  # PROMPT, and another one
            prompt = ids(42, first)
            assert engine.generate(prompt, PARAMS).token_ids == m1.generate(prompt, PARAMS).token_ids
        assert calls == ["clear", "contains"]
    assert time.perf_counter() - began < 5
    goes_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)


def test_a_flush_that_leaves_pages_is_an_error(
    make_engine: MakeEngine, m1: Remembered, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with make_engine(PARTS, **over(directory)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", read_only)
            with pytest.raises(DiskError, match="cannot be removed: Read-only file system"):
                engine.flush_cache("disk")
        assert ask(engine, m1)[0] == 40
        assert engine.flush_cache("disk") and not pages(directory)


def test_a_slow_disk_is_waited_for(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DiskStore.write
    monkeypatch.setattr(DiskStore, "write", lambda *arguments: time.sleep(0.02) or write(*arguments))
    monkeypatch.setattr(disk_tier, "HANG_S", 0.08)  # less than all 11 pages take
    with make_engine(PARTS, **over(tmp_path)) as engine:
        engine.generate(PROMPT, PARAMS)
    assert len(pages(tmp_path)) == 11


def test_a_disk_that_hangs_stops_the_engine_once(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes keep pages of host memory, which others need: they wait for a moment, and then use the rest."""
    goes_on = threading.Event()
    write = DiskStore.write
    monkeypatch.setattr(DiskStore, "write", lambda *arguments: goes_on.wait(10) and write(*arguments))
    monkeypatch.setattr("m4_radix_cache.mem_cache.host_kv_pool.DISK_S", 0.02)
    with make_engine(PARTS, **over(tmp_path, host_memory_bytes=30 * page_bytes(make_engine))) as engine:
        slow = slow_allocations(engine)
        for number in range(8):
            prompt = ids(20, 5 + 10 * number)
            assert engine.generate(prompt, PARAMS).token_ids == m1.generate(prompt, PARAMS).token_ids
        assert sum(slow) == 1 < len(slow)
        goes_on.set()
        check_host_is_free(engine)


def test_reads_that_work_do_not_hide_that_writes_hang(
    make_engine: MakeEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write = DiskStore.write
    with make_engine(PARTS, **over(directory)) as engine:
        for number in range(6):
            engine.generate(ids(20, 60 + 10 * number), PARAMS)
    monkeypatch.setattr(DiskStore, "write", lambda *arguments: goes_on.wait(10) and write(*arguments))
    monkeypatch.setattr("m4_radix_cache.mem_cache.host_kv_pool.DISK_S", 0.02)
    with make_engine(PARTS, **over(directory, host_memory_bytes=30 * page_bytes(make_engine))) as engine:
        slow = slow_allocations(engine)
        for number in range(6):
            engine.generate(ids(20, 200 + 10 * number), PARAMS)
            engine.generate(ids(20, 60 + 10 * number), PARAMS)
        assert sum(slow) == 1 and engine.stats().num_disk_hit_tokens
        goes_on.set()
        check_host_is_free(engine)


def slow_allocations(engine: LLMEngine) -> list[bool]:
    """Of each allocation of host pages from now on, whether it waited."""
    cache: Any = cache_of(engine)
    alloc, slow = cache.host.alloc, list[bool]()

    def timed(num_pages: int) -> Any:
        began = time.perf_counter()
        try:
            return alloc(num_pages)
        finally:
            slow.append(time.perf_counter() - began > 0.015)

    cache.host.alloc = timed
    return slow


def page_bytes(make_engine: MakeEngine) -> int:
    with make_engine(**setting(host_memory_bytes=2**20)) as engine:
        cache: Any = cache_of(engine)
        return int(cache.host.page_bytes)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_closed_engine_holds_nothing_of_its_tiers(make_engine: MakeEngine, directory: Path) -> None:
    with make_engine(PARTS, **over(directory)) as engine:
        engine.generate(PROMPT, PARAMS)
        pool = cache_of(engine).host
        held = [weakref.ref(array) for array in (*pool._host_layers, *pool._device_layers, *pool._parts)]
        held.append(weakref.ref(pool.storages[0]))
    gc.collect()
    assert engine.stats().num_steps and not any(reference() is not None for reference in held)
    assert not hasattr(cache_of(engine), "open_disk"), "it has the models"


def open_threads() -> list[NativeThread]:
    return [each for each in gc.get_objects() if isinstance(each, NativeThread) and not each.is_closed]


def test_threads_end_with_the_engine(loaded: Any, directory: Path) -> None:
    """After `close`, and without it; those of C++, too."""
    before = set(threading.enumerate())
    engine = EngineMaker(m4_radix_cache, loaded)(PARTS, **over(directory))
    engine.generate(PROMPT, PARAMS)
    own = set(threading.enumerate()) - before
    assert len(own) + len(open_threads()) == 5
    engine.close()
    engine.close()
    assert not own & set(threading.enumerate()) and not open_threads()
    maker = EngineMaker(m4_radix_cache, loaded)
    engine = maker(PARTS, **over(directory))
    engine.add_request(PROMPT, PARAMS)
    engine.step()
    own = set(threading.enumerate()) - before
    maker.engines.clear()
    del engine
    gc.collect()
    for thread in own:
        thread.join(5)
    assert not own & set(threading.enumerate()) and not open_threads()


def test_what_is_in_flight_is_written_before_an_engine_is_closed(
    make_engine: MakeEngine, m1: Remembered, tmp_path: Path
) -> None:
    with make_engine(PARTS, **over(tmp_path)) as engine:
        engine.add_request(PROMPT, PARAMS)
        engine.step()  # the prompt is being written to the host
    assert len(pages(tmp_path)) == 10
    with make_engine(PARTS, **over(tmp_path)) as engine:
        assert ask(engine, m1)[0] == 40
