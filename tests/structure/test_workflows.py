"""The workflows call the scripts of `.ci/`, and the weekly one takes dependencies without upper bounds."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ci", "newest"])
def test_a_workflow_runs_a_script_that_exists_with_the_supported_versions_of_python(name: str) -> None:
    job = yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yml").read_text(encoding="utf-8"))["jobs"][name]
    (script,) = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / script, os.X_OK)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    supported = {text.rpartition(" :: ")[2] for text in classifiers if "Python :: 3." in text}
    assert name != "ci" or set(job["strategy"]["matrix"]["python"]) == supported


def test_the_newest_versions_have_no_upper_bound_and_nothing_else_changes(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    copy = tmp_path / "pyproject.toml"
    copy.write_text(text, encoding="utf-8")
    (command,) = [
        line for line in (ROOT / ".ci/newest").read_text(encoding="utf-8").splitlines() if line.startswith("sed")
    ]
    subprocess.run(["bash", "-c", command], env=os.environ | {"copy": str(tmp_path)}, check=True)
    project = tomllib.loads(copy.read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    named = project["project"]["dependencies"] + [each for extra in extras for each in extra]
    assert "torch>=2.11" in named and [each for each in named if "<" in each] == ["mkdocs>=1.6,<2"]
    assert project["tool"] == tomllib.loads(text)["tool"]
