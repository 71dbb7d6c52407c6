"""What holds for every test: one torch thread per worker, no network, the same numbers on every run.

What several milestones share: a tiny random model, and m1's answers with it, each of them computed once.

And where GPU tests run. A test marked `gpu` runs natively where torch sees a CUDA device, and is deselected elsewhere;
a closing line says how many that were. A test marked `interpreter` runs kernels on the CPU through Triton's interpreter
and is deselected where there is a GPU, because a process either interprets its kernels or compiles them. So
`pytest -m gpu` without a GPU runs nothing and ends like every run of no tests, with exit code 5.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: its thread pools read this once
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it reads this once, and torch.compile imports it

torch.set_num_threads(1)

# The same examples on every run, and a slow machine is no failure.
settings.register_profile("stepwise", derandomize=True, deadline=None)
settings.load_profile("stepwise")

LEFT_OUT = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests that this machine cannot run, and keep a line about them."""
    said = []
    for marker in ("gpu", "interpreter"):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        obstacle = obstacle_to(marker) if left_out else None
        if obstacle:
            said += [f"{obstacle}: 0 of {len(left_out)} {marker} tests ran"] if obstacle != COMPILES else []
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    config.stash[LEFT_OUT] = said


COMPILES = "this process compiles its kernels"  # and runs the same tests so


def obstacle_to(marker: str) -> str | None:
    """Why tests of this kind cannot run here, in a few words."""
    if marker == "gpu":
        return None if HAS_GPU else "no CUDA device here"
    if HAS_GPU:
        return COMPILES
    from m1_single_request import ConfigError
    from m3_paged_attention.attention.registry import choose

    try:
        choose("triton", torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With pytest-xdist only the workers collect, and only the controller can print: hand the lines over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A worker of pytest-xdist has ended. Each of them collected all tests."""
    config: pytest.Config = node.config
    config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in one line each what could not run here."""
    for line in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(line)
    if importlib.util.find_spec("triton") is None:
        terminalreporter.write_line("triton is not installed: its kernels were not tested")


# --- what several milestones share ------------------------------------------------------------------------------------
# Imported when it is asked for: the tests of this file run it where there is no other test.


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as files."""
    from tests.support.engines import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded_m1(tiny_directory: Path) -> Any:
    """The tiny model in transformers' hands, for the answers to give."""
    from m1_single_request import ModelConfig
    from m1_single_request.model_loader import load_model

    return load_model(ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def known_answers() -> dict[str, Any]:
    """What m1 has said so far, by engine: its model and what was changed."""
    return {}


@pytest.fixture
def make_m1(loaded_m1: Any, known_answers: dict[str, Any]) -> Iterator[Any]:
    """`make_m1(parts, seed=..., ...)`: an engine of m1, whose answers are the ones to give."""
    from tests.support.engines import RememberingMaker

    maker = RememberingMaker(loaded_m1, known_answers)
    yield maker
    maker.check()


@pytest.fixture
def m1(make_m1: Any) -> Any:
    """Gives the answers that are right to greedy and seeded requests."""
    return make_m1()


@pytest.fixture(scope="session")
def alone(loaded_m1: Any) -> Any:
    """`alone(ask, child)`: m1's answer to one child of an ask of `tests/equivalence/traffic.py`, and how it ended."""
    import m1_single_request
    from tests.equivalence.traffic import Alone
    from tests.support.engines import EngineMaker

    return Alone(EngineMaker(m1_single_request, loaded_m1))
