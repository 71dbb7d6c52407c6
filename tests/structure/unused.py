"""Rule 1: a milestone holds only what it uses itself.

A milestone's users are its own files and those of the milestones before it, on which it builds: no later one, no test.
Left out are the face, overrides, dunders, `check_invariants`, and the fields of what is read as a whole: events,
messages, tuples.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from tests.structure.reads import is_self, reads_of
from tests.structure.sources import (
    FUNCTIONS,
    Class,
    Finding,
    FunctionNode,
    Module,
    Source,
    last_name,
    without_docstring,
)

FACE_FILES = ("llm_engine", "sampling_params", "config", "outputs", "errors")
"""Files whose exported classes are the face, with all their public members."""
FIELD_ENUMERATIONS = ("ForwardMode", "RequestStatus")
"""Enumerations that carry the field's names, of which a milestone may not need all."""
READ_AS_A_WHOLE = ("Event", "NamedTuple", "Struct", "TypedDict")
OWN_BASES = (*READ_AS_A_WHOLE, "ABC", "Enum", "Exception", "Generic", "IntEnum", "Protocol", "StrEnum", "object")
"""Bases from libraries that call no method of their children by its name."""


def everything_is_read(source: Source) -> Iterator[Finding]:
    """Functions, classes, constants, methods, fields and parameters that nothing reads."""
    usage = Usage(source)
    for module in source.modules.values():
        for node in module.tree.body:
            for name in bound_names(node):
                full_name, kind = f"{module.name}.{name}", kind_of(node)
                if full_name not in usage.face and not usage.is_read(full_name, module, node):
                    yield Finding(full_name, f"{module.name}:{node.lineno}", f"nothing reads the {kind} {full_name}")
    for cls in source.classes.values():
        for name, node in members(cls):
            if not usage.is_free(cls, name, node) and not usage.is_member_read(cls, name, node):
                full_name, kind = f"{cls.name}.{name}", "method" if isinstance(node, FUNCTIONS) else "field"
                yield Finding(full_name, f"{cls.module.name}:{node.lineno}", f"nothing reads the {kind} {full_name}")
    for owner, module, node, cls in functions(source):
        for name in parameters(node) if usage.has_own_signature(node, cls) else ():
            if not usage.is_parameter_read(name, node, cls):
                text = f"{owner} does not read its parameter {name}"
                yield Finding(f"{owner}({name})", f"{module.name}:{node.lineno}", text)


def options_are_given(source: Source) -> Iterator[Finding]:
    """Parameters with a default that no call gives: they wait for a later milestone."""
    usage = Usage(source)
    for owner, module, node, cls in functions(source):
        if usage.is_face(owner, node, cls) or not usage.has_own_signature(node, cls) or node.name == "main":
            continue
        is_method = cls and not any(last_name(decorator) == "staticmethod" for decorator in node.decorator_list)
        for name, position in options(node):
            position = position - 1 if is_method and position is not None else position
            if not usage.is_given(name, position, node, cls, module.package):
                text = f"no call of {owner} gives {name}"
                yield Finding(f"{owner}({name})", f"{module.name}:{node.lineno}", text)


class Usage:
    """Answers for all milestones at once; each answer looks only at a milestone and those before it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reads = reads_of(source)
        self.face = {full_name for module in source.modules.values() for full_name in exported(source, module)}
        defined = {name.rpartition(".")[2] for name in (*source.classes, *(f[0] for f in functions(source)))}
        self.unknown = self.reads.calls.keys() - defined
        """Callees that the packages do not define: entries of a table, parameters, functions of libraries."""

    def is_read(self, name: str, module: Module, node: ast.stmt) -> bool:
        """Return whether a module-level name is read outside its own definition."""
        places = self.reads.names[name]
        return any(place.module.package <= module.package and not place.inside(module, node) for place in places)

    def is_free(self, cls: Class, name: str, node: ast.stmt | ast.expr) -> bool:
        """Return whether a member needs no reader."""
        if is_dunder(name) or name == "check_invariants" or (self.in_face(cls) and not name.startswith("_")):
            return True
        if any(name in base.members or name in base.attributes for base in self.source.ancestors(cls)):
            return True
        bases = self.base_names(cls)
        if isinstance(node, FUNCTIONS):
            return not bases.issubset(OWN_BASES)
        return cls.node.name in FIELD_ENUMERATIONS or not bases.isdisjoint(READ_AS_A_WHOLE)

    def is_member_read(self, cls: Class, name: str, node: ast.stmt | ast.expr) -> bool:
        """Return whether an attribute is read, a method outside itself."""
        family = self.family(cls)
        return name in cls.names_read or any(
            place.module.package <= cls.package
            and (place.owner is None or place.owner.name in family)
            and not (isinstance(node, FUNCTIONS) and place.inside(cls.module, node))
            for place in self.reads.attributes[name]
        )

    def has_own_signature(self, node: FunctionNode, cls: Class | None) -> bool:
        """Return whether it has a body, and neither a base nor a Protocol prescribes its parameters."""
        if is_stub(node) or (is_dunder(node.name) and node.name not in ("__init__", "__call__")):
            return False
        if cls is None or node.name == "__init__":
            return True
        if cls.is_protocol or any(node.name in base.members for base in self.source.ancestors(cls)):
            return False
        prescribed = self.protocol_methods.get(node.name, cls.package + "z") <= cls.package
        return self.base_names(cls).issubset(OWN_BASES) and not prescribed

    def is_parameter_read(self, name: str, node: FunctionNode, cls: Class | None) -> bool:
        """Return whether the function reads its parameter, or an override of the same milestones does."""
        overrides = [c.members.get(node.name) for c in self.relatives(cls)] if cls and node.name != "__init__" else []
        bodies = [other for other in (node, *overrides) if isinstance(other, FUNCTIONS)]
        names = [n for body in bodies for s in body.body for n in ast.walk(s) if isinstance(n, ast.Name)]
        return name.startswith("_") or any(n.id == name for n in names)

    def is_given(self, name: str, position: int | None, node: FunctionNode, cls: Class | None, package: str) -> bool:
        """Return whether a call gives the parameter; where it is unknown what is called, by keyword."""
        called = {node.name}
        if cls and node.name == "__init__":
            called = {name.rpartition(".")[2] for name in self.family(cls)}
        certain = [(arguments, position) for name_of in called for arguments in self.reads.calls[name_of]]
        others = [arguments for callee in self.unknown for arguments in self.reads.calls[callee]]
        return any(a.package <= package and a.give(name, where) for a, where in certain) or any(
            a.package <= package and name in a.keywords for a in others
        )

    def is_face(self, owner: str, node: FunctionNode, cls: Class | None) -> bool:
        """Return whether users call it."""
        is_public = not node.name.startswith("_") or node.name == "__init__"
        return owner in self.face or (cls is not None and is_public and self.in_face(cls))

    def in_face(self, cls: Class) -> bool:
        return cls.name in self.face and cls.module.name.rpartition(".")[2] in FACE_FILES

    @cached_property
    def protocol_methods(self) -> dict[str, str]:
        """Methods of Protocols, each with the first milestone that has one."""
        protocols = sorted((c for c in self.source.classes.values() if c.is_protocol), key=lambda c: c.package)
        return {name: cls.package for cls in reversed(protocols) for name in cls.members}

    @cached_property
    def descendants(self) -> dict[str, list[Class]]:
        found = defaultdict(list)
        for cls in self.source.classes.values():
            for base in self.source.ancestors(cls):
                found[base.name].append(cls)
        return found

    def relatives(self, cls: Class) -> list[Class]:
        """Its descendants in its milestone."""
        return [other for other in self.descendants[cls.name] if other.package <= cls.package]

    def family(self, cls: Class) -> set[str]:
        return {c.name for c in (cls, *self.source.ancestors(cls), *self.relatives(cls))}

    def base_names(self, cls: Class) -> set[str]:
        """Bases outside the packages, and the names of those inside."""
        classes = [cls, *self.source.ancestors(cls)]
        own = {c.node.name for c in classes} - {"Event"}
        return {last_name(base) for c in classes for base in c.node.bases} - own


def exported(source: Source, module: Module) -> Iterator[str]:
    """Full names of what a milestone's `__all__` lists, also by `*face.__all__`."""
    for star in module.stars if "." not in module.name else []:
        yield from (source.full_name(source.modules[star], ast.Name(name)) for name in listed(source.modules[star]))
    yield from (source.full_name(module, ast.Name(name)) for name in listed(module) if "." not in module.name)


def listed(module: Module) -> list[str]:
    """The names that `__all__` lists itself."""
    lists = [n.value for n in module.tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    names = [name for found in lists if isinstance(found, ast.List) for name in found.elts]
    return [str(name.value) for name in names if isinstance(name, ast.Constant)]


def kind_of(node: ast.stmt) -> str:
    """The word for a definition at the top of a module."""
    if isinstance(node, FUNCTIONS):
        return "function"
    return "class" if isinstance(node, ast.ClassDef) else "constant"


def bound_names(node: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return [name for name in names if not is_dunder(name)]


def members(cls: Class) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """Names that its body binds, and attributes that its methods set on `self`."""
    yield from cls.members.items()
    set_on_self = [n for n in ast.walk(cls.node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    yield from {n.attr: n for n in set_on_self if is_self(n.value) and n.attr not in cls.members}.items()


def functions(source: Source) -> Iterator[tuple[str, Module, FunctionNode, Class | None]]:
    """Functions of modules and methods of classes, by full name."""
    for module in source.modules.values():
        yield from ((f"{module.name}.{n.name}", module, n, None) for n in module.tree.body if isinstance(n, FUNCTIONS))
    for cls in source.classes.values():
        methods = [node for node in cls.node.body if isinstance(node, FUNCTIONS)]
        yield from ((f"{cls.name}.{node.name}", cls.module, node, cls) for node in methods)


def parameters(node: FunctionNode) -> list[str]:
    """Names of all parameters but `self` and `cls`."""
    arguments = node.args
    some = [a for a in (arguments.vararg, arguments.kwarg) if a]
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *some]
    return [a.arg for a in named if a.arg not in ("self", "cls")]


def options(node: FunctionNode) -> Iterator[tuple[str, int | None]]:
    """Parameters with a default, each with its position if it has one."""
    by_position = [*node.args.posonlyargs, *node.args.args]
    first = len(by_position) - len(node.args.defaults)
    yield from ((a.arg, index) for index, a in enumerate(by_position) if index >= first)
    yield from (
        (a.arg, None) for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default
    )


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_stub(node: FunctionNode) -> bool:
    """Return whether its body is empty, or only raises `NotImplementedError`."""
    body = without_docstring(node)
    if body and isinstance(body[0], ast.Raise):
        return "NotImplementedError" in ast.unparse(body[0])
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)
