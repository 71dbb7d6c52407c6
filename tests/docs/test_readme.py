"""README.md: its two commands stand as promised, the notebooks open with the extra that it names, its links lead on."""

import re
import tomllib

import pytest

from tests.docs.snippets import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command",
    [
        "pip install -e . && python -m m6_multimodal_pd.demo",
        'pip install -e ".[test]" && pytest',
        'pip install -e ".[notebooks]" && jupyter lab notebooks',
    ],
)
def test_each_of_these_commands_is_a_block_of_its_own(command: str) -> None:
    assert f"\n```bash\n{command}\n```\n" in TEXT


def test_jupyter_lab_comes_with_the_extra_of_the_notebooks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {re.split("[<>=]", needed)[0] for needed in extras["notebooks"]} >= {"jupyterlab", "ipykernel", "nbconvert"}


def test_the_cpu_build_of_torch_is_one_that_the_package_accepts() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (torch,) = (each for each in needed if each.startswith("torch"))
    assert f'pip install "{torch}" --index-url https://download.pytorch.org/whl/cpu' in TEXT.splitlines()


def test_every_link_leads_to_a_file() -> None:
    shown = re.sub(r"<!--.*?-->", "", TEXT, flags=re.S)
    links = [link for link in re.findall(r"\]\(([^)#]+)", shown) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
