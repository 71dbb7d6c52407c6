"""Every rule catches what it forbids, shown on small sources. What it allows is in the packages."""

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
    ],
)
def test_a_missing_docstring_is_found(code: str, wrong: str) -> None:
    (line,) = findings(rules.docstrings_are_there, code)
    assert wrong in line


# --- events -----------------------------------------------------------------------------------------------------------

EVENTS = "class Event: pass\nclass Detail(Event): pass\nclass Admit(Detail): pass\nclass Number: pass"
BUILT_HERE = {
    "a lambda": "def f(tracer):\n    tracer.emit(lambda: Admit())",
    "another name": "from m1_x.events import Admit as A\ndef f(tracer):\n    tracer.emit(A())",
    "by its module": "from m1_x import events\ndef f(tracer):\n    tracer.emit(events.Admit())",
}
TESTED = {
    "an attribute": "def f(self):\n    if self._tracer:\n        self._tracer.emit(Admit)",
    "and": "def f(self, x):\n    if x > 1 and self.tracer:\n        self.tracer.emit(Admit)",
    "is not None": "def f(tracer):\n    if tracer is not None:\n        tracer.emit(Admit)",
}


def event_findings(code: str, name: str = "m2_y.scheduler") -> list[str]:
    code = f"from m1_x.events import Admit, Number\n{code}"
    return findings(rules.events_are_built_by_the_tracer, code, name=name, m1_x__events=EVENTS)


@pytest.mark.parametrize("code", BUILT_HERE.values(), ids=BUILT_HERE)
def test_an_event_that_the_tracer_does_not_build_is_found(code: str) -> None:
    assert len(event_findings(code)) == 1


@pytest.mark.parametrize("code", TESTED.values(), ids=TESTED)
def test_a_test_for_a_reader_is_found(code: str) -> None:
    assert len(event_findings(code)) == 1
