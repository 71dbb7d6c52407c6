"""A user's program with groups of engines, which it does not close: it drops them, is interrupted or killed.

Each line that it prints is JSON. Of a program that drops groups: how long each took to end, and what was left of it. Of
any: its engines' process ids and how the names of their shared memory begin, with nothing left to do but what is asked.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from m6_multimodal_pd import CacheConfig, EngineUsageError, LLMEngine, ModelConfig, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from tests.m6_multimodal_pd.processes import own_engines

NUM_GROUPS = 10
DELAYS_S = (0.02, 0.2, 1.0, 2.5, 4.0)
"""When the constructor is interrupted."""


def made(model: str) -> Any:
    return LLMEngine(
        model_config=ModelConfig(model=model, device="cpu", dtype="float32"),
        cache_config=CacheConfig(max_total_tokens=2048),
        disaggregation_config=DisaggregationConfig(),
    )


def asked(engine: Any) -> Any:
    return engine.generate([5, 6, 7], SamplingParams(max_tokens=3))


def say(began: float, kept: int = 0) -> None:
    print(json.dumps({"seconds": time.monotonic() - began, "left": len(own_engines()) - kept}), flush=True)


def ten(model: str) -> Any:
    """As in a notebook, whose cell is run ten times: the new group is made before the old one is dropped."""
    engine: Any = None
    for number in range(NUM_GROUPS):
        another = made(model)
        asked(another)
        stream = another.stream([5, 6, 7], SamplingParams(max_tokens=500))
        next(stream)
        if number % 3 == 1:
            os.kill(own_engines()[-1], signal.SIGSTOP)
        del stream
        began = time.monotonic()
        engine = another
        gc.collect()
        say(began, kept=2)
        another = None
    return engine


def interrupted(model: str) -> Any:
    """By Ctrl-C while it starts."""
    began = 0.0

    def interrupt(*_: Any) -> None:
        nonlocal began
        began = time.monotonic()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    for delay in DELAYS_S:
        try:
            threading.Timer(delay, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
            made(model)
            while True:  # it was faster
                time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        gc.collect()
        say(began)
    return made(model)


def exit_(model: str) -> Any:
    """The exception that the interpreter keeps for a debugger holds the group, and so does a cycle."""
    engine = made(model)
    asked(engine)
    engine.own = engine
    try:
        engine.abort_request("nobody")
        raise ValueError(engine)
    except ValueError as error:
        sys.last_value = error
    return engine


def thread(model: str) -> Any:
    """A thread that nobody waits for is inside a step when the program ends."""
    engines: list[Any] = []
    has_begun = threading.Event()

    def work() -> None:
        engines.append(made(model))
        while True:
            asked(engines[0])
            has_begun.set()

    threading.Thread(target=work, daemon=True).start()
    has_begun.wait()
    return engines[0]


def fork(model: str) -> Any:
    """A forked process drops its copy of the group, and ends as a program does."""
    global ENGINE
    ENGINE = made(model)
    asked(ENGINE)
    if (pid := os.fork()) == 0:
        try:
            asked(ENGINE)
        except EngineUsageError:
            ENGINE.own = ENGINE
            del ENGINE
            gc.collect()
        sys.exit(0)
    began = time.monotonic()
    _, status = os.waitpid(pid, 0)
    assert status == 0 and asked(ENGINE).error is None
    say(began, kept=2)
    return ENGINE


def held(engine: Any) -> None:
    group = engine.engine_core.router.links._group
    print(json.dumps({"end": time.time(), "pids": own_engines(), "group": group}), flush=True)


def idle(model: str) -> None:
    """Waits to be killed."""
    with made(model) as engine:
        asked(engine)
        held(engine)
        signal.pause()


def busy(model: str) -> None:
    """Keeps its engines at work."""
    with made(model) as engine:
        held(engine)
        while True:
            engine.generate_batch([[5, 6, 7]] * 3, SamplingParams(max_tokens=200, ignore_eos=True), progress=False)


WORKS = {each.__name__: each for each in (ten, interrupted, exit_, thread, fork, idle, busy)}


def main(model: str, work: str) -> None:
    """Do one of the above and end, with a group that nobody has closed."""
    globals()["KEPT"] = engine = WORKS[work](model)
    held(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
