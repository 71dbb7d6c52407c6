"""The milestone packages keep the rules of the architecture, and every tool knows every milestone."""

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch

import pytest

from tests.structure import rules
from tests.structure.exceptions import FILE, MILESTONES, ROOT, RULES, Key, findings, read, write
from tests.structure.sources import Finding, Source

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [*MILESTONES, "stepwise_player"]


@pytest.fixture(scope="module")
def source() -> Source:
    return Source.from_packages(ROOT, MILESTONES)


@pytest.fixture(scope="module")
def found(source: Source) -> dict[Key, Finding]:
    return findings(source)


@pytest.fixture(scope="module")
def exceptions() -> dict[Key, str]:
    return read(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_milestones_keep_the_rule(rule: Callable[[Source], list[str]], source: Source) -> None:
    found = rule(source)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_a_known_exception(
    rule: str, found: dict[Key, Finding], exceptions: dict[Key, str]
) -> None:
    unknown = [str(finding) for key, finding in found.items() if key.rule == rule and key not in exceptions]
    assert not unknown, "\n".join(unknown)


def test_every_exception_is_needed(found: dict[Key, Finding], exceptions: dict[Key, str]) -> None:
    unneeded = [f"{key.rule}: {key.name}" for key in exceptions.keys() - found.keys()]
    assert not unneeded, "python -m tests.structure.exceptions --prune removes:\n" + "\n".join(sorted(unneeded))


def test_every_exception_has_a_reason(exceptions: dict[Key, str]) -> None:
    assert {key.rule for key in exceptions} <= RULES.keys()
    assert [key for key, reason in exceptions.items() if not reason] == []


def test_the_exceptions_are_in_order(exceptions: dict[Key, str]) -> None:
    assert FILE.read_text(encoding="utf-8") == write(exceptions)


def test_the_rules_see_the_engine(source: Source) -> None:
    """An empty list of findings must not come from an empty list of files."""
    names = {name.removeprefix("m1_single_request.") for name in source.classes if name.startswith("m1_")}
    assert {"llm_engine.LLMEngine", "scheduler.Scheduler", "events.Batch", "sampler.Sampler"} <= names


def test_the_import_contracts_cover_every_package() -> None:
    linter = PYPROJECT["tool"]["importlinter"]
    upward, checkout = linter["contracts"]
    assert sorted(linter["root_packages"]) == PACKAGES
    assert sorted(checkout["source_modules"]) == PACKAGES
    assert set(PACKAGES) <= {name for layer in upward["layers"] for name in re.findall(r"\w+", layer)}


def test_mypy_checks_every_package() -> None:
    patterns = PYPROJECT["tool"]["mypy"]["files"]
    assert [name for name in PACKAGES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_wheel_has_every_package() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert [name for name in PACKAGES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_package_says_that_it_is_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").exists()] == []


def test_the_site_is_built_again_after_a_change_of_any_package() -> None:
    watched = re.findall(r"^watch: \[(.*)\]$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert watched == [", ".join([*PACKAGES, "notebooks"])]
