"""transformers on two ranks and the engine on two ranks give the same log-probabilities."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.m8_parallel.groups import TORCHRUN
from tests.m8_parallel.test_engine import Groups, Models


def theirs(model: str, output: Path) -> list[list[float]]:
    """What transformers finds on two ranks."""
    done = subprocess.run(
        [*TORCHRUN, "2", "-m", "tests.m8_parallel.oracle", model, str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(output.read_text("utf-8"))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["qwen3", "qwen2", "qwen3_moe"])
def test_two_ranks_of_transformers_agree(groups: Groups, models: Models, model: str, tmp_path: Path) -> None:
    ours = groups(2).ask("logprobs", model=models(model))["found"]
    for own, other in zip(ours, theirs(models(model), tmp_path / "found.json"), strict=True):
        assert own == pytest.approx(other, abs=1e-4)
