"""Rule 2: what may be inherited from an earlier milestone, and what may not; shown on small sources."""

from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest

from tests.structure import inheritance
from tests.structure.sources import Finding, Source

SCHEDULER = """
class Scheduler:
    def schedule(self): return self.order()
    def order(self): return []
    def open(self): raise NotImplementedError
"""


def names(rule: Callable[[Source], Iterator[Finding]], *codes: str) -> list[str]:
    """Names of the findings; each code is the `scheduler` of one milestone, the first of m1."""
    texts = {f"m{number}_x.scheduler": dedent(code) for number, code in enumerate(codes, 1)}
    return [finding.name for finding in rule(Source.from_texts(texts))]


def chain(first: str, *, length: int, body: str = "pass") -> list[str]:
    """`first` and, in each later milestone, a class `A` that inherits from the one before."""
    later = [f"from m{n}_x.scheduler import A as Base\nclass A(Base):\n    {body}" for n in range(1, length)]
    return [first, *later]


def test_a_third_step_is_found_and_two_are_fine() -> None:
    first = "class A:\n    def f(self): return 1"
    assert names(inheritance.inheritance_takes_two_steps, *chain(first, length=3)) == []
    assert names(inheritance.inheritance_takes_two_steps, *chain(first, length=4)) == ["m4_x.scheduler.A"]


LATER = "from m1_x.scheduler import Scheduler as Earlier\nclass Scheduler(Earlier):\n    "


@pytest.mark.parametrize(
    "body",
    [
        "def schedule(self): return super().schedule()",
        "def schedule(self): return Earlier.schedule(self)",
        "def update_from_output(self, output):\n        done = super().update_from_output(output)\n        return done",
    ],
)
def test_a_verb_that_hands_on_is_found(body: str) -> None:
    assert len(names(inheritance.verbs_are_written_out, SCHEDULER, LATER + body)) == 1


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('"""Another one."""\n    def order(self): return [1]', ["m2_x.scheduler.Scheduler.order"]),
        ("def order(self): return [1]", ["m2_x.scheduler.Scheduler.order"]),
        ('"""`order` is by priority."""\n    def order(self): return [1]', []),
        ('"""Another one."""\n    def open(self): return 1', []),  # the earlier one leaves it open
        ('"""Another one."""\n    def __init__(self): self.x = 1', []),
    ],
)
def test_a_docstring_names_what_the_class_replaces(body: str, wrong: list[str]) -> None:
    assert names(inheritance.overriding_is_named, SCHEDULER, LATER + body) == wrong


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("class A:\n    def f(self): ...\nclass B:\n    def g(self): ...\nclass C(A, B): pass", ["m1_x.scheduler.C"]),
        ("class OrderMixin:\n    def f(self): ...", ["m1_x.scheduler.OrderMixin"]),
        (
            "from typing import Protocol\nclass A:\n    def f(self): ...\n"
            "class P(Protocol):\n    def g(self): ...\nclass C(A, P): pass",
            [],
        ),
        ("from enum import Enum\nclass A(str, Enum):\n    X = 'x'", []),
    ],
)
def test_mixins_are_found(code: str, wrong: list[str]) -> None:
    assert names(inheritance.there_are_no_mixins, code) == wrong


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("parts = {}\n    default_model: str = 'a'", []),
        ("def flush_cache(self): return True", []),
        ("def generate(self): return 2", ["m2_x.scheduler.LLMEngine.generate"]),
        ("def __init__(self): self.x = 1", ["m2_x.scheduler.LLMEngine.__init__"]),
    ],
)
def test_a_later_engine_sets_attributes_and_adds_calls(body: str, wrong: list[str]) -> None:
    first = "class LLMEngine:\n    def __init__(self): pass\n    def generate(self): return 1"
    later = f"from m1_x.scheduler import LLMEngine as Base\nclass LLMEngine(Base):\n    {body}"
    assert names(inheritance.engines_add_calls, first, later) == wrong


# --- events -----------------------------------------------------------------------------------------------------------

ADMIT = "class Event: pass\nclass Admit(Event): pass"


def test_an_event_that_is_defined_again_is_found_and_one_that_is_extended_is_fine() -> None:
    again = "from m1_x.scheduler import Event\nclass Admit(Event): pass"
    extended = "from m1_x.scheduler import Admit as SingleAdmit\nclass Admit(SingleAdmit): pass"
    assert names(inheritance.events_are_extended, ADMIT, again) == ["m2_x.scheduler.Admit"]
    assert names(inheritance.events_are_extended, ADMIT, extended) == []
    assert names(inheritance.events_are_extended, ADMIT, again.replace("Admit", "Leave")) == []
