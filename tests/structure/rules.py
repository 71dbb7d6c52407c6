"""Rules of style that a syntax tree can show, one function each: source in, findings out.

A finding is a line for people: where, and what is wrong. An empty list means that the rule is kept.
"""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from tests.structure.sources import FUNCTIONS, Class, FunctionNode, Module, Source

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sizes_are_kept(source: Source) -> list[str]:
    """A longer file or function holds a second idea."""
    found = []
    for module in source.modules.values():
        lines = len(module.text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{_at(module, node)}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return found


def docstrings_are_there(source: Source) -> list[str]:
    """Every module, public class and public function says what it is for.

    A method needs none if it is private or a dunder, if an ancestor documents it, if it is a Protocol's stub, or if it
    is an accessor of one or two statements.
    """
    found = []
    for module in source.modules.values():
        if not ast.get_docstring(module.tree):
            found.append(f"{module.name}: the module has no docstring")
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found += _undocumented_in_class(source, Class(module, node))
            elif isinstance(node, FUNCTIONS) and not node.name.startswith("_") and not ast.get_docstring(node):
                found.append(f"{_at(module, node)}: the function {node.name} has no docstring")
    return found


def events_are_built_by_the_tracer(source: Source) -> list[str]:
    """The tracer builds every event: a call site passes a factory to `emit` and does not test for a reader.

    An event is constructed only in a module of events, by a classmethod or a function of it.
    """
    events = {name for name, cls in source.classes.items() if source.is_a(cls, "Event")}
    found = []
    for module in source.modules.values():
        if module.name.endswith(("events", "trace_event")):
            continue
        for node, parents in _with_parents(module.tree):
            if isinstance(node, ast.Call) and source.full_name(module, node.func) in events:
                found.append(f"{_at(module, node)}: {ast.unparse(node.func)} is built here, not by the tracer")
            if _is_tracer(node) and _is_tested(node, parents[0]):
                found.append(f"{_at(module, node)}: tests whether there is a reader")
    return found


RULES = (sizes_are_kept, docstrings_are_there, events_are_built_by_the_tracer)


def _at(module: Module, node: ast.stmt | ast.expr) -> str:
    return f"{module.name}:{node.lineno}"


def _undocumented_in_class(source: Source, cls: Class) -> list[str]:
    found = []
    if not ast.get_docstring(cls.node):
        found.append(f"{_at(cls.module, cls.node)}: the class {cls.node.name} has no docstring")
    for node in cls.node.body:
        if not isinstance(node, FUNCTIONS) or node.name.startswith("_") or ast.get_docstring(node):
            continue
        inherited = any(_documents(base, node.name) for base in source.ancestors(cls))
        if not inherited and not cls.is_protocol and _num_statements(node) > 2:
            found.append(f"{_at(cls.module, node)}: the method {cls.node.name}.{node.name} has no docstring")
    return found


def _documents(cls: Class, method: str) -> bool:
    node = cls.members.get(method)
    return isinstance(node, FUNCTIONS) and bool(ast.get_docstring(node))


def _num_statements(node: FunctionNode) -> int:
    """All statements of the body, those inside other statements included."""
    return sum(isinstance(inner, ast.stmt) for statement in node.body for inner in ast.walk(statement))


def _with_parents(tree: ast.AST, parents: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node with the nodes around it, innermost first."""
    yield tree, parents
    for child in ast.iter_child_nodes(tree):
        yield from _with_parents(child, (tree, *parents))


def _is_tracer(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    """Return whether this is `tracer`, `self.tracer` or `self._tracer`."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") == "tracer"


def _is_tested(node: ast.expr, parent: ast.AST) -> bool:
    """Return whether `parent` is a condition, or a part of one, that depends on `node` itself."""
    if isinstance(parent, ast.If | ast.IfExp | ast.While):
        return parent.test is node
    return isinstance(parent, ast.BoolOp | ast.Compare | ast.UnaryOp)
