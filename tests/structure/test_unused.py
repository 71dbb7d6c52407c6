"""Rule 1 finds what nothing in a milestone uses, shown on small sources. What it must let be is in the packages."""

from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest

from tests.structure.sources import Finding, Source
from tests.structure.unused import everything_is_read, options_are_given


def names(rule: Callable[[Source], Iterator[Finding]], code: str, **others: str) -> list[str]:
    """Names of the findings in `code` as `m1_x.engine`, beside `others` (`__` stands for a dot)."""
    texts = {"m1_x.engine": dedent(code)} | {name.replace("__", "."): dedent(text) for name, text in others.items()}
    return [finding.name.removeprefix("m1_x.engine.") for finding in rule(Source.from_texts(texts))]


UNREAD = {
    "a function": ("def f(): pass", "f"),
    "a class that only it makes": ("class A:\n    def __len__(self): return A()", "A"),
    "one of two constants": ("A, B = 1, 2\nprint(A)", "B"),
    "a method": ("class A:\n    def f(self): pass\nprint(A)", "A.f"),
    "a method of another class's self": (
        "class A:\n    def f(self): pass\nclass B:\n    def __len__(self): return self.f()\nprint(A, B)",
        "A.f",
    ),
    "a field that is only counted": ("class A:\n    x: int = 0\n    def __len__(self): self.x += 1\nprint(A)", "A.x"),
    "a Protocol's attribute": ("from typing import Protocol\nclass A(Protocol):\n    x: int\nprint(A)", "A.x"),
    "a member of an enumeration": ("from enum import Enum\nclass A(Enum):\n    ONE = 1\nprint(A)", "A.ONE"),
    "a parameter": ("def f(x): return 1\nf(2)", "f(x)"),
}


@pytest.mark.parametrize(("code", "name"), UNREAD.values(), ids=UNREAD)
def test_what_nothing_reads_is_found(code: str, name: str) -> None:
    assert names(everything_is_read, code) == [name]


def test_a_later_milestone_does_not_count_and_an_earlier_one_does() -> None:
    code = "class A:\n    def f(self): pass\nprint(A)"
    assert names(everything_is_read, code, m2_y__engine="def g(a): a.f()\ng(1)") == ["A.f"]
    assert names(everything_is_read, "def g(a): a.f()\ng(1)", m2_y__engine=code) == []
    later = "from m1_x.engine import A as B\nprint(B)"
    assert names(everything_is_read, "class A: pass", m2_y__engine=later) == ["A"]


UNGIVEN = {
    "of a function": ("def f(x=1): return x\nf()", "f(x)"),
    "given to another class": (
        "class A:\n    def __init__(self, x=1): self.x = x\n"
        "class B:\n    def __init__(self, x): self.x = x\nA(), B(x=2)",
        "A.__init__(x)",
    ),
}


@pytest.mark.parametrize(("code", "name"), UNGIVEN.values(), ids=UNGIVEN)
def test_an_option_that_no_call_gives_is_found(code: str, name: str) -> None:
    assert names(options_are_given, code) == [name]


def test_an_option_that_only_a_later_milestone_gives_is_found() -> None:
    later = "from m1_x.engine import f as g\ng(x=2)"
    assert names(options_are_given, "def f(x=1): return x\nf()", m2_y__engine=later) == ["f(x)"]
