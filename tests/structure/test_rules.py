"""Every rule catches what it forbids and accepts what it allows, shown on small sources."""

from collections.abc import Callable
from textwrap import dedent

import pytest

from tests.structure import rules
from tests.structure.sources import Source

BASE = '''
"""The scheduler."""

class Scheduler:
    """Decides who runs."""

    def schedule(self): return self.order()
    def order(self): return []
    def admit(self): return None
    def count(self): return 0
    def limit(self): return 1
    def secret(self): return 2

class Queue(Scheduler):
    """Waits."""

class Reader:
    """Reads."""

    def step(self):
        """Left to others."""
        raise NotImplementedError
'''


def findings(
    rule: Callable[[Source], list[str]], code: str, *, name: str = "m2_y.scheduler", **others: str
) -> list[str]:
    """What `rule` says about `code` as module `name`, beside the m1 above and `others` (`__` stands for a dot)."""
    exports = '"""The first milestone."""\nfrom m1_x.scheduler import Scheduler as Base, Queue, Reader'
    texts = {"m1_x": exports, "m1_x.scheduler": BASE}
    texts |= {other.replace("__", "."): dedent(text) for other, text in others.items()}
    return rule(Source.from_texts(texts | {name: dedent(code)}))


# --- overriding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        """
        from m1_x import Base
        class Later(Base):
            def schedule(self): return super().schedule()[:1]
        """,
        """
        import m1_x.scheduler as earlier
        class Between(earlier.Scheduler): pass
        class Later(Between):
            async def schedule(self):
                chosen = super().schedule()
                return chosen
        """,
    ],
    ids=["directly", "through a class between, async"],
)
def test_a_verb_that_is_overridden_in_part_is_found(code: str) -> None:
    (line,) = findings(rules.verbs_are_whole, code)
    assert "overrides schedule in part" in line


@pytest.mark.parametrize(
    "code",
    [
        """
        class Scheduler:
            def schedule(self): return []
        """,
        """
        from m1_x import Base
        class Later(Base):
            def schedule(self): return []
        """,
        """
        from m1_x import Base
        class Later(Base):
            def order(self): return super().order()[1:]
        """,
        """
        class Mine:
            def step(self): return 1
        class Yours(Mine):
            def step(self): return super().step()
        """,
    ],
    ids=["written anew", "overridden whole", "a decision below a verb", "within one milestone"],
)
def test_a_verb_may_be_written_whole(code: str) -> None:
    assert findings(rules.verbs_are_whole, code) == []


CHAIN = {
    "m2_y__scheduler": "from m1_x import Base\nclass Second(Base): pass",
    "m3_z__scheduler": "from m2_y.scheduler import Second\nclass Third(Second): pass",
}


def test_behaviour_that_inherits_through_three_milestones_is_found() -> None:
    code = "from m3_z.scheduler import Third\nclass Fourth(Third): pass"
    (line,) = findings(rules.behaviour_inherits_through_two_milestones, code, name="m4_a.scheduler", **CHAIN)
    assert line.startswith("m4_a.scheduler:2: m4_a.scheduler.Fourth")


def test_behaviour_may_inherit_through_two_milestones() -> None:
    code = CHAIN["m3_z__scheduler"]
    assert (
        findings(
            rules.behaviour_inherits_through_two_milestones,
            code,
            name="m3_z.scheduler",
            m2_y__scheduler=CHAIN["m2_y__scheduler"],
        )
        == []
    )


@pytest.mark.parametrize(
    "code",
    [
        "from m3_z.scheduler import Third\n@dataclasses.dataclass(frozen=True)\nclass D(Third): pass",
        "from m3_z.scheduler import Third\nclass D(Third, ValueError): pass",
    ],
    ids=["a dataclass", "an error"],
)
def test_a_record_may_inherit_through_every_milestone(code: str) -> None:
    assert findings(rules.behaviour_inherits_through_two_milestones, code, name="m4_a.scheduler", **CHAIN) == []


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("def _inside(self): return 1", "does more than"),
        ("def __init__(self): self.x = 1", "does more than"),
        ("print('hello')", "does more than"),
        ("def generate(self): return 2", "overrides a method of another engine"),
    ],
)
def test_a_later_engine_that_does_more_than_add_attributes_and_calls_is_found(body: str, wrong: str) -> None:
    first = "class LLMEngine:\n    def generate(self): return 1"
    code = f"from m1_x.llm_engine import LLMEngine as Base\nclass LLMEngine(Base):\n    parts = {{}}\n    {body}"
    (line,) = findings(rules.engines_add_attributes_and_calls, code, m1_x__llm_engine=first)
    assert line.startswith("m2_y.scheduler:4:") and wrong in line


def test_a_later_engine_adds_attributes_and_calls() -> None:
    code = '''
        from m1_x.llm_engine import LLMEngine as Base
        class LLMEngine(Base):
            """The same engine with other parts."""
            parts = {}
            default_model: str = "a"
            def flush_cache(self): return True
        '''
    first = "class LLMEngine:\n    def generate(self): return 1"
    assert findings(rules.engines_add_attributes_and_calls, code, m1_x__llm_engine=first) == []


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
