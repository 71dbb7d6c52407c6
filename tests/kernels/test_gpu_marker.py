"""What becomes of tests marked `gpu` where there is no GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        ("-m gpu -n 1", pytest.ExitCode.NO_TESTS_COLLECTED, "no tests ran"),  # a worker counts, the controller prints
        ("-n 0", pytest.ExitCode.OK, "1 passed, 1 deselected"),
    ],
)
def test_one_line_says_that_gpu_tests_did_not_run(tmp_path, arguments, exit_code, summary) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    Path(tmp_path, "test_both.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    command += [*arguments.split(), tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert done.stdout.count("no CUDA device here: 0 of 1 gpu tests ran") == 1
    assert summary in done.stdout
