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


# --- events -----------------------------------------------------------------------------------------------------------

EVENTS = "class Event: pass\nclass Detail(Event): pass\nclass Admit(Detail): pass\nclass Number: pass"
BUILT_HERE = {
    "at the call": "def f(tracer):\n    tracer.emit(Admit())",
    "a lambda": "def f(tracer):\n    tracer.emit(lambda: Admit())",
    "a helper": "def f(x):\n    return Admit(x)",
    "another name": "from m1_x.events import Admit as A\ndef f(tracer):\n    tracer.emit(A())",
    "by its module": "from m1_x import events\ndef f(tracer):\n    tracer.emit(events.Admit())",
}
TESTED = {
    "if": "def f(tracer):\n    if tracer:\n        tracer.emit(Admit)",
    "an attribute": "def f(self):\n    if self._tracer:\n        self._tracer.emit(Admit)",
    "and": "def f(self, x):\n    if x > 1 and self.tracer:\n        self.tracer.emit(Admit)",
    "not": "def f(tracer):\n    if not tracer:\n        return",
    "an expression": "def f(tracer):\n    return 1 if tracer else 2",
    "is not None": "def f(tracer):\n    if tracer is not None:\n        tracer.emit(Admit)",
}
BUILT_BY_THE_TRACER = {
    "the class": "def f(tracer):\n    tracer.emit(Admit, rid='a')",
    "a factory": "def f(self, x):\n    if x:\n        self.tracer.emit(Admit.of, x)",
    "no event": "def f(x):\n    return Number() if isinstance(x, Admit) else Other()",
    "another attribute": "def f(self):\n    return self.tracer.step if self.tracer.step else 0",
}


def event_findings(code: str, name: str = "m2_y.scheduler") -> list[str]:
    code = f"from m1_x.events import Admit, Number\n{code}"
    return findings(rules.events_are_built_by_the_tracer, code, name=name, m1_x__events=EVENTS)


@pytest.mark.parametrize("code", BUILT_HERE.values(), ids=BUILT_HERE)
def test_an_event_that_the_tracer_does_not_build_is_found(code: str) -> None:
    assert len(event_findings(code)) == 1


def test_a_module_of_events_builds_them() -> None:
    assert event_findings(BUILT_HERE["a helper"], name="m2_y.kv_events") == []


@pytest.mark.parametrize("code", TESTED.values(), ids=TESTED)
def test_a_test_for_a_reader_is_found(code: str) -> None:
    assert len(event_findings(code)) == 1


@pytest.mark.parametrize("code", BUILT_BY_THE_TRACER.values(), ids=BUILT_BY_THE_TRACER)
def test_an_event_that_the_tracer_builds_is_fine(code: str) -> None:
    assert event_findings(code) == []
