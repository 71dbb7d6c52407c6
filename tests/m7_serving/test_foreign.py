"""Tools that others wrote find the server as they expect it: `tests/foreign`, in an environment of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.foreign.checks import CHECKS
from tests.foreign.environment import ROOT, Environment


@pytest.mark.minutes
@pytest.mark.exhaustive  # the environment has 2.4 GB, and stays in the checkout for later runs
def test_foreign_tools_find_no_fault(tmp_path: Path) -> None:
    tools = Environment(Path(os.environ.get("STEPWISE_FOREIGN_VENV", ROOT / ".venv-foreign")))
    try:
        tools.install()
    except subprocess.SubprocessError as error:
        pytest.skip(f"the extra `foreign` cannot be installed here: {error}")
    for check in CHECKS:
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(tools, folder)
