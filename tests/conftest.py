"""What holds for every test: one torch thread per worker, no network, the same numbers on every run.

What several milestones share: a tiny random model, and m1's answers with it, each of them computed once.

And which tests run:

- A test marked `exhaustive` (a long random run, a kill, most of a full matrix) is left out and counted in a closing
  line, unless the command line chooses with `-m` or names the test itself. `pytest -m exhaustive` runs these.
- Of the parameter sets of a test marked `sample(n)`, n run by default, spread evenly. Where it is marked `sample`, as
  many as have every value of every parameter; with `sample(of=...)`, a function of the parameters, as many as have
  every value that it returns. The others are exhaustive. Those marked `alone` have a sample of their own: m1's.
- A test marked `minutes` takes minutes, and runs before the others, so that the workers end together.
- A test made by hypothesis runs on a fifth of its examples by default (`tests/support/amounts.py`), and is exhaustive
  too: with `-m` it has all of them.
- A test marked `browser` needs Chromium or Chrome; where there is none, it is deselected, and a closing line says so.
- A test marked `gpu` runs natively where torch sees a CUDA device, and is deselected elsewhere; a closing line counts
  these tests. A test marked `interpreter` runs kernels on the CPU through Triton's interpreter and is deselected
  where there is a GPU, because a process either interprets its kernels or compiles them. So `pytest -m gpu` without a
  GPU runs nothing and ends like every run of no tests, with exit code 5.
"""

import gc
import importlib.util
import os
import shutil
import signal
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: its thread pools read this once
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background inherits this, and hands it on
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it reads this once, and torch.compile imports it

torch.set_num_threads(1)

# The same examples on every run, and a slow machine is no failure.
settings.register_profile("all", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("few", settings.get_profile("all"), max_examples=20)
settings.load_profile("few")

HAS_CONTRACTS = Path(__file__).with_name("contracts").is_dir()  # a copy of this file alone is tested, too
pytest_plugins = ["tests.contracts.plugin"] if HAS_CONTRACTS else []  # `pytest --part`: a learner's own part

BROWSER_FLAGS = "--no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update"
LEFT_OUT = pytest.StashKey[list[str]]()
SAMPLED_APART = ("gpu", "interpreter", "alone")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """A GPU has one memory: tests that measure it run one after the other."""
    return 1 if HAS_GPU else None


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: how many examples hypothesis makes, and that only a learner's part is recorded."""
    settings.load_profile("all" if wants_all(config) else "few")
    if not config.getoption("--part", None):
        os.environ["STEPWISE_PROGRESS"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what is found here: nothing of it goes away again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def wants_all(config: pytest.Config) -> bool:
    """Whether the command line chooses with `-m`, and not just leaves out what is left out anyway."""
    chosen = config.option.markexpr
    return bool(chosen) and chosen.count("exhaustive") in (0, chosen.count("not exhaustive") + 1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is exhaustive; after -m and -k have chosen, take out what does not run, and keep a line about it."""
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)
    mark_the_rest_of_samples(items)
    if wants_all(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)) or item.get_closest_marker("hypothesis"):
                item.add_marker("exhaustive")
    result = yield
    lines = []
    for marker in ("gpu", "interpreter", "browser"):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        obstacle = obstacle_to(marker) if left_out else None
        if obstacle:
            lines += [f"{obstacle}: 0 of {len(left_out)} {marker} tests ran"] if obstacle != COMPILES else []
            leave_out(left_out, config, items)
    if not config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive") and not is_named(item, config)]
        lines += [f"{len(left_out)} exhaustive tests left out: `pytest -m exhaustive` runs them"] if left_out else []
        leave_out(left_out, config, items)
    config.stash[LEFT_OUT] = lines
    return result


def leave_out(left_out: list[pytest.Item], config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take these out of those that run."""
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names this very test, with its parameters or without."""
    name = item.nodeid.partition("::")[2]
    for path, _, chosen in (argument.partition("::") for argument in config.args):
        same = chosen and (name == chosen or name.startswith((f"{chosen}[", f"{chosen}::")))
        if same and Path(config.invocation_params.dir, path).resolve() == item.path:
            return True
    return False


def mark_the_rest_of_samples(items: list[pytest.Item]) -> None:
    """What is not in the sample of its test is exhaustive. Each kind of kernels has a sample of its own, m1 another."""
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            kind = tuple(marker for marker in SAMPLED_APART if item.get_closest_marker(marker))
            groups.setdefault((item.nodeid.partition("[")[0], kind), []).append(item)
    for (name, _), group in groups.items():
        if len(group) == 1:
            continue
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        sample = evenly(group, *marker.args, name) if marker.args else with_every_value(group, **marker.kwargs)
        for item in set(group) - set(sample):
            item.add_marker("exhaustive")


def evenly(group: list[pytest.Item], number: int, name: str) -> list[pytest.Item]:
    """So many of them, from another start in every test: where tests share parameters, together they have them all."""
    start, number = zlib.crc32(name.encode()), min(number, len(group))
    return [group[(start + i * len(group) // number) % len(group)] for i in range(number)]


def with_every_value(group: list[pytest.Item], of: Any = None) -> list[pytest.Item]:
    """As few of them as have each value, about: of each parameter, or those that `of` makes of the parameters."""
    of = of or (lambda **params: {(name, id(value)) for name, value in params.items()})
    values = {item: set(of(**item.callspec.params)) for item in group}  # type: ignore[attr-defined]
    missing, chosen = set[Any]().union(*values.values()), []
    while missing:
        chosen.append(max(group, key=lambda item: len(values[item] & missing)))
        missing -= values[chosen[-1]]
    return chosen


COMPILES = "this process compiles its kernels"  # and runs the same tests so


def obstacle_to(marker: str) -> str | None:
    """Why tests of this kind cannot run here, in a few words."""
    if marker == "browser":
        return None if CHROMIUM else "no Chromium and no Chrome here"
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
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} needs numpy < 2.4, not {version('numpy')}"
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
    """Name in one line each what could not run here."""
    for line in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(line)
    if importlib.util.find_spec("triton") is None:
        terminalreporter.write_line("triton is not installed: its kernels were not tested")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a screen (Playwright).

    While it is open, its event loop runs in this thread: tests with a loop of their own belong into another module.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=BROWSER_FLAGS.split())
        yield chromium
        chromium.close()


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
def loaded(tiny_directory: Path) -> Any:
    """The tiny model in the decoder of m3 and later, loaded once for all engines."""
    from m3_paged_attention import ModelConfig
    from m3_paged_attention.model_loader import load_model

    return load_model(ModelConfig(model=tiny_directory, device="cpu", dtype="float32"))


@pytest.fixture
def engine(make_engine: Any) -> Any:
    """A fresh engine with the default limits, of the milestone whose `make_engine` it is."""
    return make_engine()


@pytest.fixture(scope="session")
def known_answers() -> dict[str, Any]:
    """The answers of m1 so far, by engine: its model and what was changed."""
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


@pytest.fixture(params=["in sequence", "in blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which a sampler adds up probabilities: a CPU's, or a GPU's on this CPU."""
    from m1_single_request import running_sums

    if request.param == "in blocks":
        monkeypatch.setattr(running_sums, "search_in_sequence", running_sums.search_in_blocks)
    return str(request.param)
