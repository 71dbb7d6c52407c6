"""README.md: its two commands stand as promised, its examples run, its links lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.mark.parametrize(
    "command", ["pip install -e . && python -m m6_multimodal_pd.demo", 'pip install -e ".[test]" && pytest']
)
def test_each_of_the_two_commands_is_a_block_of_its_own(command: str) -> None:
    assert f"{command}\n" in blocks("bash")


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_the_example_runs(code: str) -> None:
    scope: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), scope)
    engine = scope["engine"]
    assert engine.stats().num_running == 0
    engine.close()


def test_the_notebooks_open_in_the_jupyter_lab_that_their_extra_brings() -> None:
    assert 'pip install -e ".[notebooks]" && jupyter lab notebooks\n' in blocks("bash")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {re.split("[<>=]", needed)[0] for needed in extras["notebooks"]} >= {"jupyterlab", "ipykernel", "nbconvert"}


def test_the_cpu_build_of_torch_is_one_that_the_package_accepts() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (torch,) = (each for each in needed if each.startswith("torch"))
    assert f'pip install "{torch}" --index-url https://download.pytorch.org/whl/cpu\n' in blocks("bash")


def test_every_link_leads_to_a_file() -> None:
    shown = re.sub(r"<!--.*?-->", "", TEXT, flags=re.S)
    links = [link for link in re.findall(r"\]\(([^)#]+)", shown) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
