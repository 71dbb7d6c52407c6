"""docs/api: every module of m6, m7 and m8 has a section, in one place."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
QUOTED = [
    (page.name, name)
    for page in sorted(API.glob("*.md"))
    for name in re.findall(r"^::: (m[678]_[\w.]+)$", page.read_text(encoding="utf-8"), re.M)
]
"""Page and module, or class, of each section."""
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("m6_multimodal_pd", "m7_serving", "m8_parallel")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py") and not path.name.startswith("demo")
]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_one_section(module: str) -> None:
    found = [page for page, name in QUOTED if name == module or name.startswith(f"{module}.")]
    assert len(found) == 1, f"{module} stands in {found}"


def test_no_section_is_about_a_module_that_is_gone() -> None:
    assert [name for _, name in QUOTED if name not in MODULES and name.rpartition(".")[0] not in MODULES] == []
