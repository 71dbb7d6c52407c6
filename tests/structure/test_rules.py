"""Every rule catches what it forbids and accepts what it allows, shown on small sources."""

from collections.abc import Callable
from textwrap import dedent

import pytest

from tests.structure import rules
from tests.structure.sources import Source


def findings(
    rule: Callable[[Source], list[str]], code: str, *, name: str = "m2_y.scheduler", **others: str
) -> list[str]:
    """What `rule` says about `code` as module `name`, beside `others` (`__` stands for a dot)."""
    texts = {other.replace("__", "."): dedent(text) for other, text in others.items()}
    return rule(Source.from_texts(texts | {name: dedent(code)}))


# --- sizes, docstrings, forbidden calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "wrong"), [(400, 0), (401, 1)])
def test_a_file_may_have_400_lines(lines: int, wrong: int) -> None:
    assert len(findings(rules.sizes_are_kept, "x = 1\n" * lines)) == wrong


@pytest.mark.parametrize(("lines", "wrong"), [(60, 0), (61, 1)])
def test_a_function_may_have_60_lines(lines: int, wrong: int) -> None:
    code = "class A:\n    def method(self):\n" + "        x = 1\n" * (lines - 1)
    assert len(findings(rules.sizes_are_kept, code)) == wrong


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("x = 1", "the module has no docstring"),
        ('"""M."""\nclass A: pass', "the class A has no docstring"),
        ('"""M."""\ndef f(): return 1', "the function f has no docstring"),
        ('"""M."""\nclass A:\n    """A."""\n    def f(self):\n        x = 1\n        y = 2\n        return x', "A.f"),
        (
            '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        if self:\n            x = 1\n        return 1',
            "A.f",
        ),
    ],
)
def test_a_missing_docstring_is_found(code: str, wrong: str) -> None:
    (line,) = findings(rules.docstrings_are_there, code)
    assert wrong in line


def test_what_needs_no_docstring() -> None:
    code = '''
        """A module."""
        from typing import Protocol
        def _private(): return 1
        class _Private: pass
        class Interface(Protocol):
            """A role."""
            def call(self) -> int: ...
        class Base:
            """A base."""
            def __len__(self):
                x, y = 1, 2
                z = x + y
                return z
            def _inside(self):
                x, y = 1, 2
                z = x + y
                return z
            def said(self):
                """Say it."""
                raise NotImplementedError
            def short(self):
                x = 1
                return x
        class Derived(Base):
            """Derived."""
            def said(self):
                x, y = 1, 2
                z = x + y
                return z
        '''
    assert findings(rules.docstrings_are_there, code) == []


@pytest.mark.parametrize(
    "code",
    [
        "print('x')",
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import dill.session",
        "import torch\ntorch.load('model.bin')",
    ],
)
def test_printing_and_pickling_are_found(code: str) -> None:
    assert len(findings(rules.nothing_prints_or_pickles, code)) == 1


def test_a_demo_prints_and_a_console_is_no_print() -> None:
    assert findings(rules.nothing_prints_or_pickles, "print('x')", name="m2_y.demo") == []
    assert findings(rules.nothing_prints_or_pickles, "console.print('x')\nfrom .pickle import x") == []


# --- events -----------------------------------------------------------------------------------------------------------

EVENTS = "class Event: pass\nclass Detail(Event): pass\nclass Admit(Detail): pass\nclass Number: pass"
BUILT_BLINDLY = {
    "no test": "def f(tracer):\n    tracer.emit(Admit())",
    "the other branch": "def f(tracer):\n    if tracer:\n        pass\n    else:\n        tracer.emit(Admit())",
    "a test of something else": "def f(tracer, x):\n    if x:\n        tracer.emit(Admit())",
    "or": "def f(tracer, x):\n    if tracer or x:\n        tracer.emit(Admit())",
    "not": "def f(tracer):\n    if not tracer:\n        tracer.emit(Admit())",
    "is not None": "def f(tracer):\n    if tracer is not None:\n        tracer.emit(Admit())",
    "an early return": "def f(tracer):\n    if not tracer:\n        return\n    tracer.emit(Admit())",
    "a test around the function": "if tracer:\n    def f(tracer):\n        return Admit()",
    "a lambda": "def f(tracer):\n    if tracer:\n        return lambda: Admit()",
    "in the test itself": "def f(tracer):\n    if tracer and Admit():\n        pass",
    "another name": "from m1_x.events import Admit as A\ndef f(tracer):\n    tracer.emit(A())",
    "by its module": "from m1_x import events\ndef f(tracer):\n    tracer.emit(events.Admit())",
}
BUILT_FOR_A_READER = {
    "tracer": "def f(tracer):\n    if tracer:\n        tracer.emit(Admit())",
    "self.tracer": "def f(self):\n    if self.tracer:\n        for x in y:\n            self.tracer.emit(Admit())",
    "and": "def f(self, x):\n    if x > 1 and self.tracer:\n        self.tracer.emit(Admit())",
    "no event": "def f(x):\n    return Number() if isinstance(x, Admit) else Other()",
}
FACTORY = 'def make(x):\n    """The event; built only for a reader."""\n    y = x + 1\n    return Admit(y)\n'


def event_findings(code: str) -> list[str]:
    code = f"from m1_x.events import Admit, Number\n{code}"
    return findings(rules.events_cost_nothing_unread, code, m1_x__events=EVENTS)


@pytest.mark.parametrize("code", BUILT_BLINDLY.values(), ids=BUILT_BLINDLY)
def test_an_event_built_without_a_reader_is_found(code: str) -> None:
    assert len(event_findings(code)) == 1


@pytest.mark.parametrize("code", BUILT_FOR_A_READER.values(), ids=BUILT_FOR_A_READER)
def test_an_event_built_under_a_test_of_the_tracer_is_fine(code: str) -> None:
    assert event_findings(code) == []


def test_a_function_that_makes_an_event_is_called_under_a_test_of_the_tracer() -> None:
    assert event_findings(f"{FACTORY}def f(tracer):\n    if tracer:\n        tracer.emit(make(1))") == []
    (line,) = event_findings(f"{FACTORY}def f(tracer):\n    tracer.emit(make(1))")
    assert line.startswith("m2_y.scheduler:7: make is used")


def test_a_function_that_makes_an_event_and_does_not_say_so_is_found() -> None:
    assert len(event_findings(FACTORY.replace("built only for a reader", "made"))) == 1
