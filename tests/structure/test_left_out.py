"""What tests/conftest.py leaves out of a run, and what it repairs before one."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TESTS = """
import os, signal, pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2])
def test_long(number):
    pass

@pytest.mark.exhaustive
@pytest.mark.gpu
def test_long_on_a_gpu():
    pass

@pytest.mark.gpu
def test_on_a_gpu():
    pass

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert os.system("exec python3 -c 'import signal; exit(signal.getsignal(2) is signal.SIG_IGN)'") == 0
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run these tests as this checkout runs its own, in this process."""
    monkeypatch.delitem(sys.modules, "tests.conftest", raising=False)  # so that it is read once more
    pytester.mkdir("tests")
    shutil.copy(ROOT / "tests/conftest.py", pytester.path / "tests")
    Path(pytester.path, "tests/test_these.py").write_text(TESTS)
    given = ["-c", ROOT / "pyproject.toml", "--rootdir", pytester.path, "-n", "0", "-p", "no:cacheprovider"]
    return lambda *arguments: pytester.runpytest_inprocess(*given, *arguments)


@pytest.mark.interpreter  # deselected where there is a GPU
@pytest.mark.parametrize(
    ("arguments", "passed", "num_exhaustive", "num_gpu"),
    [
        ("tests/test_these.py", 1, 1, 2),
        ("-m exhaustive", 2, 0, 1),
        ("tests/test_these.py::test_long", 2, 0, 0),
        ("tests/test_these.py::test_long[2] tests/test_these.py::test_ctrl_c", 2, 0, 0),
        ("-m not(exhaustive)", 1, 0, 1),
        ("-m gpu", 0, 0, 2),
        pytest.param("-m gpu -n 1", 0, 0, 2, marks=pytest.mark.exhaustive),  # a worker counts, the controller prints
    ],
)
def test_a_line_counts_the_exhaustive_tests_and_those_of_a_gpu_that_did_not_run(
    run, arguments: str, passed: int, num_exhaustive: int, num_gpu: int
) -> None:
    done = run(*arguments.split())
    assert done.ret == (pytest.ExitCode.OK if passed else pytest.ExitCode.NO_TESTS_COLLECTED)
    assert done.parseoutcomes().get("passed", 0) == passed
    output = done.stdout.str()
    assert output.count("exhaustive tests left out: `pytest -m exhaustive` runs them") == num_exhaustive
    assert output.count("gpu tests ran") == (num_gpu > 0)
    assert output.count(f"no CUDA device here: 0 of {num_gpu} gpu tests ran") == (num_gpu > 0)


def test_a_run_in_the_background_has_its_ctrl_c(run) -> None:
    """A shell starts such a job with SIGINT ignored, which every process that a test starts would inherit."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run("-k", "ctrl_c").assert_outcomes(passed=1, deselected=4)
    finally:
        signal.signal(signal.SIGINT, before)


SAMPLED = """
import pytest
from hypothesis import given, strategies as st
from tests.support.amounts import examples

@pytest.mark.{sample}
@pytest.mark.parametrize("letter", ["a", "b", "c"])
@pytest.mark.parametrize("number", range(4))
def test_of_a_matrix(letter, number):
    pass

seen = []

@given(st.integers())
def test_by_hypothesis(number):
    seen.append(number)

def test_it_was_tried_often():
    assert examples(100) / 2 < len(seen) < examples(100) * 2
    print("examples:", examples(100))
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("sample", "default", "exhaustive"),
    [
        ("sample", 4, 8),  # each letter and each number once
        ("sample(5)", 5, 7),
        ("sample(50)", 12, 0),
        ("sample(of=lambda letter, number: {letter})", 3, 9),
        ("sample(of=lambda letter, number: {number} if letter == 'b' else ())", 4, 8),
    ],
)
def test_of_a_sample_some_run_by_default_and_the_others_with_the_exhaustive_ones(
    run, sample: str, default: int, exhaustive: int
) -> None:
    Path("tests/test_these.py").write_text(SAMPLED.replace("{sample}", sample))
    done = run("-s", "tests/test_these.py")
    done.assert_outcomes(passed=default + 2, deselected=12 - default)
    assert "examples: 20" in done.stdout.str()
    run("-m", "exhaustive").assert_outcomes(passed=exhaustive + 1, deselected=default + 1)
    done = run("-s", "-m", "exhaustive or not exhaustive")
    done.assert_outcomes(passed=14)
    assert "examples: 100" in done.stdout.str()
