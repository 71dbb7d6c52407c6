"""Rule 1 finds what nothing in a milestone uses, and nothing else; shown on small sources."""

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
    "only by itself": ("def f(): return f", "f"),
    "a class": ("class A: pass", "A"),
    "a class that only it makes": ("class A:\n    def __len__(self): return A()", "A"),
    "a constant": ("LIMIT: int = 1", "LIMIT"),
    "one of two constants": ("A, B = 1, 2\nprint(A)", "B"),
    "a method": ("class A:\n    def f(self): pass\nprint(A)", "A.f"),
    "a property": ("class A:\n    @property\n    def f(self): return 1\nprint(A)", "A.f"),
    "a method of another class's self": (
        "class A:\n    def f(self): pass\nclass B:\n    def __len__(self): return self.f()\nprint(A, B)",
        "A.f",
    ),
    "an attribute of a library": ("import os\nclass A:\n    def f(self): pass\nprint(A, os.f)", "A.f"),
    "a field that is only set": ("class A:\n    def __init__(self): self.x = 1\nprint(A)", "A.x"),
    "a field that is only counted": ("class A:\n    x: int = 0\n    def __len__(self): self.x += 1\nprint(A)", "A.x"),
    "a Protocol's attribute": ("from typing import Protocol\nclass A(Protocol):\n    x: int\nprint(A)", "A.x"),
    "a member of an enumeration": ("from enum import Enum\nclass A(Enum):\n    ONE = 1\nprint(A)", "A.ONE"),
    "a parameter": ("def f(x): return 1\nf(2)", "f(x)"),
    "a parameter by keyword": ("def f(*, x=1): return 1\nf(x=2)", "f(x)"),
    "a constructor's parameter": ("class A:\n    def __init__(self, x): self.__len__()\nA(1)", "A.__init__(x)"),
    "arguments of any kind": ("def f(*args): return 1\nf(2)", "f(args)"),
}
READ = {
    "a call": "def f(): pass\nf()",
    "a name in a table": "def f(): pass\nprint({'f': f})",
    "an annotation": "class A: pass\ndef f(x: A): return x\nf(1)",
    "an annotation as a string": "class A: pass\ndef f(x: 'A') -> 'list[int]': return x\nf(1)",
    "a base": "class A: pass\nclass B(A): pass\nprint(B)",
    "an attribute of anything": "class A:\n    def f(self): pass\ndef g(x): return x.f()\ng(A())",
    "by name": "class A:\n    def f(self): pass\nprint(getattr(A(), 'f'))",
    "in a pattern": "class A:\n    x: int\ndef g(a):\n    match a:\n        case A(x=1): return 1\ng(1)",
    "self of a descendant": (
        "class A:\n    def f(self): pass\nclass B(A):\n    def __len__(self): return self.f()\nprint(B)"
    ),
    "self of an ancestor": (
        "class A:\n    def __len__(self): return self.f()\nclass B(A):\n    def f(self): pass\nprint(B)"
    ),
    "an override": "class A:\n    def f(self): pass\nclass B(A):\n    def f(self): pass\nA().f()\nprint(B)",
    "a library calls it": "from torch.nn import Module\nclass A(Module):\n    def forward(self, x): return 1\nprint(A)",
    "check_invariants": "class A:\n    def check_invariants(self): pass\nprint(A)",
    "a dunder": "class A:\n    def __eq__(self, other): return True\nprint(A)",
    "a field of an event": "class Event: pass\nclass Admit(Event):\n    rid: str\nprint(Admit)",
    "a field of a tuple": "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int\nprint(A)",
    "the field's enumeration": "from enum import Enum\nclass ForwardMode(Enum):\n    EXTEND = 1\nprint(ForwardMode)",
    "a parameter": "def f(x): return lambda: x\nf(2)",
    "a parameter with an underscore": "def f(_x): return 1\nf(2)",
    "a parameter that an override reads": (
        "class A:\n    def f(self, x): return 1\nclass B(A):\n    def f(self, x): return x\nB().f(1)"
    ),
    "a parameter of a Protocol": (
        "from typing import Protocol\nclass A(Protocol):\n    def f(self, x): ...\n"
        "class B:\n    def f(self, x): return 1\ndef g(a: A): return a.f(B)\ng(1)"
    ),
    "a parameter of what is left open": "class A:\n    def f(self, x): raise NotImplementedError\nA().f(1)",
}


@pytest.mark.parametrize(("code", "name"), UNREAD.values(), ids=UNREAD)
def test_what_nothing_reads_is_found(code: str, name: str) -> None:
    assert names(everything_is_read, code) == [name]


@pytest.mark.parametrize("code", READ.values(), ids=READ)
def test_what_is_read_is_fine(code: str) -> None:
    assert names(everything_is_read, code) == []


def test_a_later_milestone_does_not_count_and_an_earlier_one_does() -> None:
    code = "class A:\n    def f(self): pass\nprint(A)"
    assert names(everything_is_read, code, m2_y__engine="def g(a): a.f()\ng(1)") == ["A.f"]
    assert names(everything_is_read, "def g(a): a.f()\ng(1)", m2_y__engine=code) == []
    later = "from m1_x.engine import A as B\nprint(B)"
    assert names(everything_is_read, "class A: pass", m2_y__engine=later) == ["A"]


EXPORTS = """
from m1_x.engine import helper
from m1_x.outputs import Output
__all__ = ["Output", "helper"]
"""


def test_a_face_that_is_imported_as_a_whole_needs_no_reader() -> None:
    face = "from m1_x.outputs import Output\n__all__ = ['Output']"
    exports = "from m1_x import face\nfrom m1_x.face import *\n__all__ = [*face.__all__]"
    outputs = "class Output:\n    def show(self): pass\nclass Other: pass"
    assert names(everything_is_read, "", m1_x=exports, m1_x__face=face, m1_x__outputs=outputs) == ["m1_x.outputs.Other"]


def test_the_face_needs_no_reader() -> None:
    outputs = "class Output:\n    text: str\n    def show(self, end=''): return end\n    def _own(self): pass"
    code = "def helper(x=1): return x\ndef other(): return 1"
    found = names(everything_is_read, code, m1_x=EXPORTS, m1_x__outputs=outputs)
    assert found == ["other", "m1_x.outputs.Output._own"]
    assert names(options_are_given, code, m1_x=EXPORTS, m1_x__outputs=outputs) == []


UNGIVEN = {
    "of a function": ("def f(x=1): return x\nf()", "f(x)"),
    "by keyword": ("def f(a, *, x=1): return x\nf(2)", "f(x)"),
    "of a method": ("class A:\n    def f(self, a, x=1): return x\nA().f(2)", "A.f(x)"),
    "of a constructor": ("class A:\n    def __init__(self, x=1): self.x = x\nA()", "A.__init__(x)"),
    "given to another class": (
        "class A:\n    def __init__(self, x=1): self.x = x\n"
        "class B:\n    def __init__(self, x): self.x = x\nA(), B(x=2)",
        "A.__init__(x)",
    ),
}
GIVEN = {
    "by position": "def f(x=1): return x\nf(2)",
    "to a method by position": "class A:\n    def f(self, x=1): return x\nA().f(2)",
    "to a static method": "class A:\n    @staticmethod\n    def f(x=1): return x\nA.f(2)",
    "by keyword": "def f(*, x=1): return x\nf(x=2)",
    "as one of many": "def f(x=1): return x\nf(*[2])",
    "in a mapping": "def f(x=1): return x\nf(**{})",
    "by partial": "from functools import partial\ndef f(a, x=1): return x\npartial(f, x=2)",
    "by the tracer": "def f(a, x=1): return x\ntracer.emit(f, 0, x=2)",
    "to an entry of a table": "class A:\n    def __init__(self, x=1): self.x = x\nPARTS = {'a': A}\nPARTS['a'](x=2)",
    "to a class in a variable": "class A:\n    def __init__(self, x=1): self.x = x\ndef g(made): made(x=2)\ng(A)",
    "by super": (
        "class A:\n    def __init__(self, x=1): self.x = x\n"
        "class B(A):\n    def __init__(self): super().__init__(x=2)\nB()"
    ),
    "by cls": "class A:\n    def __init__(self, x=1): self.x = x\n    @classmethod\n    def f(cls): return cls(x=2)",
    "by a command line": "def main(argv=None): return argv\nmain()",
    "a parameter that must be given": "def f(x): return x",
}


@pytest.mark.parametrize(("code", "name"), UNGIVEN.values(), ids=UNGIVEN)
def test_an_option_that_no_call_gives_is_found(code: str, name: str) -> None:
    assert names(options_are_given, code) == [name]


@pytest.mark.parametrize("code", GIVEN.values(), ids=GIVEN)
def test_an_option_that_a_call_gives_is_fine(code: str) -> None:
    assert names(options_are_given, code) == []


def test_an_option_that_only_a_later_milestone_gives_is_found() -> None:
    later = "from m1_x.engine import f as g\ng(x=2)"
    assert names(options_are_given, "def f(x=1): return x\nf()", m2_y__engine=later) == ["f(x)"]


def test_an_option_under_another_name_is_given() -> None:
    code = "from m1_x.tools import f as g\ng(x=2)"
    assert names(options_are_given, code, m1_x__tools="def f(x=1): return x") == []
