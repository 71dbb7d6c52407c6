"""A group that is dropped instead of closed: its processes and sockets end at once, whatever they do and wait for.

What hangs, hangs in the garbage collector; so it is tried in a thread or a process that can be left behind.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from m6_multimodal_pd import CacheConfig, EngineConfig, EngineDeadError, LLMEngine, ModelConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.assembly import start_engines
from m6_multimodal_pd.disaggregation.runtime.processes import ProcessLinks
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.processes import (
    Loop,
    configs,
    eventually,
    group_of,
    in_a_thread,
    num_sockets,
    own_engines,
    pid_of,
    segments,
)

END_S = 20.0
"""Nothing that ends by itself takes so long, on a busy machine either: a dropped group ends in 1 or 2 s, and so does a
program, most of it the interpreter's own end. What waits for a dropped group waits for ever.
"""
START_S, PROGRAM_S = 300.0, 900.0
"""Nothing takes so long, on a busy machine either: to start a group, and a program that starts ten."""


def test_processes_that_have_not_joined_end_when_the_collector_finds_their_group(seeing_directory: Path) -> None:
    before = own_engines()
    config = EngineConfig(model=configs(seeing_directory)["model_config"], disaggregation=DisaggregationConfig())

    def drop() -> None:
        links = ProcessLinks(config, is_traced=False)
        start_engines(links, config.disaggregation)
        Loop(links)
        del links
        assert eventually(lambda: len(own_engines()) == len(before) + 2)  # /proc knows a new command a moment later
        gc.collect()

    in_a_thread(drop, END_S)
    assert own_engines() == before


@pytest.mark.exhaustive
def test_a_group_killed_by_interrupts_ends_at_close(seeing_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_engines(), num_sockets()
    with group_of(seeing_directory) as engine:
        router = engine.engine_core.router
        stream, group, listen = engine.stream([5, 6, 7], greedy(200)), router.links._group, router.listen
        next(stream)

        def interrupted(timeout_s: float) -> Any:
            changed = listen(timeout_s)
            signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGINT)
            return changed

        monkeypatch.setattr(router, "listen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            engine.step()
        assert not engine.has_unfinished_requests() and len(own_engines()) == len(before[0]) + 2
    assert (own_engines(), num_sockets(), segments(group)) == (*before, [])


@pytest.mark.exhaustive
def test_a_group_that_is_dropped_at_work_ends_where_its_last_user_drops_it(seeing_directory: Path) -> None:
    before = own_engines(), num_sockets()

    def drop() -> None:
        engine: Any = group_of(seeing_directory)
        group = engine.engine_core.router.links._group
        stream = engine.stream([5, 6, 7], greedy(200))
        next(stream)
        os.kill(pid_of(engine, "decode"), signal.SIGSTOP)
        del stream
        began = time.monotonic()
        del engine
        assert (own_engines(), num_sockets(), segments(group)) == (*before, [])
        assert time.monotonic() - began < END_S

    try:
        in_a_thread(drop, START_S)
    finally:
        gc.collect()


def test_a_group_of_this_process_is_gone_with_its_last_user_and_needs_no_collector(tiny_directory: Path) -> None:
    engine: Any = LLMEngine(
        model_config=ModelConfig(model=tiny_directory, device="cpu"),
        cache_config=CacheConfig(page_size=4, max_total_tokens=512),
        disaggregation_config=DisaggregationConfig(transport="in_process"),
    )
    assert engine.generate([5, 6, 7], greedy(3)).error is None
    links = engine.engine_core.router.links
    held = [links, *links.engines.values(), *(own.core.scheduler for own in links.engines.values())]
    alive = [weakref.ref(each) for each in held]
    del links, held
    gc.disable()
    try:
        del engine
        assert [each() for each in alive] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [b"", b'{"name": "pre'])
def test_a_process_whose_parent_stops_before_the_order_is_written_ends_without_a_word(order: bytes) -> None:
    command = [sys.executable, "-m", "m6_multimodal_pd.disaggregation.runtime.child"]
    process = subprocess.run(command, input=order, capture_output=True, timeout=PROGRAM_S, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")


PROGRAM = "tests.m6_multimodal_pd.user_program"


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", ["ten", "interrupted", "exit_", "thread", "fork"])
def test_a_program_drops_groups_and_ends_at_once(seeing_directory: Path, work: str) -> None:
    """`user_program.py` has what each of them does."""
    command = [sys.executable, "-m", PROGRAM, str(seeing_directory), work]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(PROGRAM_S, program.kill)
    timer.start()
    try:
        assert program.stdout is not None and program.stderr is not None
        lines = [json.loads(line) for line in program.stdout]  # to the end of the last process that holds it
        ended = time.time()
        stderr = program.stderr.read()
        assert program.wait(END_S) == 0 and stderr == "", stderr
    finally:
        timer.cancel()
        program.kill()
        program.communicate()
    *told, last = lines
    assert all(own["left"] == 0 and own["seconds"] < END_S for own in told), told
    assert ended - last["end"] < END_S
    assert not eventually(lambda: [pid for pid in last["pids"] if Path(f"/proc/{pid}").exists()], 0.0)
    assert not segments(last["group"])
