"""Uses of names, attributes and arguments in the packages.

Nothing is run, so an attribute's owner is rarely certain. A read of `x.name` counts for every class that has a `name`,
one of `self.name` only for the class around it, its ancestors and descendants.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tests.structure.sources import FUNCTIONS, Class, Module, Source, last_name

BY_NAME = ("getattr", "hasattr", "attrgetter", "methodcaller")
"""Functions that read the attribute that a string names."""


@dataclass(frozen=True)
class Place:
    """A line that reads something; `owner` is the class whose attribute it is, where that is certain."""

    module: Module
    line: int
    owner: Class | None = None

    def inside(self, module: Module, node: ast.stmt) -> bool:
        return self.module is module and node.lineno <= self.line <= (node.end_lineno or node.lineno)


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call: their number by position, their names by keyword (None: `**mapping`)."""

    package: str
    num_positional: int
    keywords: frozenset[str | None]

    def give(self, name: str, position: int | None) -> bool:
        """Return whether the call passes the parameter `name`, which stands at `position`."""
        return not self.keywords.isdisjoint((name, None)) or (position is not None and position < self.num_positional)


class Reads:
    """Places that read a module-level name, by its full name, and an attribute, by its name alone; and all calls."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names: dict[str, list[Place]] = defaultdict(list)
        self.attributes: dict[str, list[Place]] = defaultdict(list)
        self.calls: dict[str, list[Arguments]] = defaultdict(list)
        """Keyed by the last name of the callee; "" for a callee without a name: an entry of a table, a result."""
        for module in source.modules.values():
            self._visit(module, module.tree, None)

    def _visit(self, module: Module, node: ast.AST, cls: Class | None) -> None:
        for child in _children(node):
            if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Load):
                self.names[self.source.full_name(module, child)].append(Place(module, child.lineno))
                if isinstance(child, ast.Attribute):
                    self._add_attribute(module, child, cls)
            elif isinstance(child, ast.MatchClass):
                for name in child.kwd_attrs:
                    self.attributes[name].append(Place(module, child.lineno))
            elif isinstance(child, ast.Call):
                self._add_call(module, child, cls)
            self._visit(module, child, Class(module, child) if isinstance(child, ast.ClassDef) else cls)

    def _add_attribute(self, module: Module, node: ast.Attribute, cls: Class | None) -> None:
        name = self.source.full_name(module, node.value)
        if is_self(node.value) and cls:
            owner = cls
        elif name in self.source.classes:
            owner = self.source.classes[name]
        elif _is_imported(module, node.value):
            return
        else:
            owner = None
        self.attributes[node.attr].append(Place(module, node.lineno, owner))

    def _add_call(self, module: Module, node: ast.Call, cls: Class | None) -> None:
        called, given = node.func, node.args
        if last_name(called) in BY_NAME:
            for argument in given:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    self.attributes[argument.value].append(Place(module, node.lineno))
        if last_name(called) in ("partial", "emit") and given:  # the first argument is called with the others
            called, given = given[0], given[1:]
        some = any(isinstance(argument, ast.Starred) for argument in given)
        keywords = frozenset(keyword.arg for keyword in node.keywords)
        arguments = Arguments(module.package, 1000 if some else len(given), keywords)
        for name in self._names_of(module, called, cls):
            self.calls[name].append(arguments)

    def _names_of(self, module: Module, called: ast.expr, cls: Class | None) -> list[str]:
        """The last name of what is called, its own one where it is imported under another; classes by `super()`."""
        if cls and isinstance(called, ast.Attribute) and called.attr == "__init__" and is_self(called.value):
            return [base.node.name for base in self.source.ancestors(cls)]
        if cls and isinstance(called, ast.Name) and called.id == "cls":
            return [cls.node.name]
        return [self.source.full_name(module, called).rpartition(".")[2] or last_name(called)]


@lru_cache(maxsize=1)
def reads_of(source: Source) -> Reads:
    """Gathered once for all rules."""
    return Reads(source)


def is_self(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def _is_imported(module: Module, node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in module.imports


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside, those of an annotation that is a string included."""
    yield from ast.iter_child_nodes(node)
    annotation = node.returns if isinstance(node, FUNCTIONS) else getattr(node, "annotation", None)
    for part in ast.walk(annotation) if annotation else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            yield ast.copy_location(ast.Name(part.value, ast.Load()), part)
