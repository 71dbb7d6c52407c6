"""Rule 4: which Protocols and ABCs have a reason, shown on small sources."""

from textwrap import dedent

import pytest

from tests.structure.protocols import protocols_have_two_implementations
from tests.structure.sources import Source

HEAD = "from abc import ABC, abstractmethod\nfrom typing import Protocol\n"
ROLE = "class Role(Protocol):\n    size: int\n    def f(self): ...\n    def _own(self): ...\n"
BASE = "class Role(ABC):\n    @abstractmethod\n    def f(self): ...\n"
CALLED = "class Role(Protocol):\n    def __call__(self, x: int) -> str: ...\n"
USER = "def use(role: Role): ...\n"


def names(code: str, later: str = "") -> list[str]:
    """Findings about m1's `code`, beside m2's `later`."""
    texts = {"m1_x.engine": HEAD + code, "m2_y.engine": f"from m1_x.engine import Role\n{dedent(later)}"}
    found = protocols_have_two_implementations(Source.from_texts(texts))
    return [finding.text.replace("m1_x.engine.", "") for finding in found]


def fits(name: str, base: str = "") -> str:
    """A class with everything that `ROLE` asks for."""
    return f"class {name}{base}:\n    def __init__(self): self.size = 1\n    def f(self): return '{name}'\n"


WRONG = {
    "a Protocol that one class fits": ROLE + USER + fits("A"),
    "a second class that lacks a method": ROLE + USER + fits("A") + "class B:\n    size: int\n",
    "a descendant that changes nothing": ROLE + USER + fits("A") + "class B(A): pass\n",
    "a Protocol that another extends": ROLE + USER + fits("A") + "class B(Role, Protocol):\n    size: int\n",
    "an ABC and a class that only looks like it": BASE + USER + fits("A", "(Role)") + fits("B"),
    "a call that one function fits": CALLED + USER + "def a(x: int) -> str: ...\ndef b(x: str) -> str: ...\n",
    "the face that hands on": ROLE + USER + fits("A") + fits("LLMEngine"),
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_a_role_without_two_implementations_is_found(code: str) -> None:
    assert " Role has " in names(code)[0]


def test_a_later_milestone_may_bring_the_second_one() -> None:
    assert names(ROLE + USER + fits("A")) == ["the Protocol Role has 1 implementations: A"]
    assert names(ROLE + USER + fits("A"), later=fits("B")) == []


def test_a_role_that_nobody_names_is_found() -> None:
    assert names(BASE + fits("A", "(Role)") + fits("B", "(Role)")) == ["those who use the ABC Role do not name it"]
