"""What becomes of tests marked `gpu` where there is no GPU."""

import shutil
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    assert False

def test_anywhere():
    pass
"""


@pytest.mark.interpreter  # deselected where there is a GPU
@pytest.mark.parametrize(
    ("arguments", "exit_code", "summary"),
    [
        pytest.param(  # a worker counts, the controller prints
            "-m gpu -n 1", pytest.ExitCode.NO_TESTS_COLLECTED, "no tests ran", marks=pytest.mark.exhaustive
        ),
        ("-n 0", pytest.ExitCode.OK, "1 passed, 1 deselected"),
    ],
)
def test_one_line_says_that_gpu_tests_did_not_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: str, exit_code: int, summary: str
) -> None:
    monkeypatch.delitem(sys.modules, "tests.conftest", raising=False)  # so that it is read once more
    shutil.copy(ROOT / "tests/conftest.py", pytester.mkdir("tests"))
    Path("tests/test_both.py").write_text(TESTS)
    done = pytester.runpytest_inprocess("-c", ROOT / "pyproject.toml", "--rootdir", pytester.path, *arguments.split())
    assert done.ret == exit_code
    assert done.stdout.str().count("no CUDA device here: 0 of 1 gpu tests ran") == 1
    assert summary in done.stdout.str()
