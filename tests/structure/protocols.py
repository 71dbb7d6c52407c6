"""Rule 4: a Protocol or ABC has two implementations that differ, and those who use it name it.

Implementations of all milestones count: m1's base of the engine core has a child in each.
"""

import ast
from collections.abc import Iterator

from tests.structure.reads import reads_of
from tests.structure.sources import FUNCTIONS, Class, Finding, Source, last_name

MIN_IMPLEMENTATIONS = 2


def protocols_have_two_implementations(source: Source) -> Iterator[Finding]:
    """Classes that only prescribe what others have: with fewer than two others, or named by no user of theirs."""
    for cls in source.classes.values():
        if not is_abstract(cls):
            continue
        kind, found = "Protocol" if cls.is_protocol else "ABC", implementations(source, cls)
        if len(found) < MIN_IMPLEMENTATIONS:
            text = f"the {kind} {cls.name} has {len(found)} implementations: {', '.join(found) or 'none'}"
            yield Finding(cls.name, cls.at, text)
        elif not is_named(source, cls):
            yield Finding(cls.name, cls.at, f"those who use the {kind} {cls.name} do not name it")


def is_named(source: Source, role: Class) -> bool:
    """Return whether it is read anywhere but as a base."""
    bases = [
        base
        for cls in source.classes.values()
        for base in cls.node.bases
        if source.full_name(cls.module, base) == role.name
    ]
    return len(reads_of(source).names[role.name]) > len(bases)


def is_abstract(cls: Class) -> bool:
    """Return whether it is a Protocol or an ABC."""
    return cls.is_protocol or "ABC" in map(last_name, cls.node.bases)


def implementations(source: Source, role: Class) -> list[str]:
    """Classes that derive from `role` or have its members; functions, too, if it is only called."""
    wanted = demanded(source, role)
    found = [
        cls.name for cls in source.classes.values() if not is_abstract(cls) and implements(source, cls, role, wanted)
    ]
    if wanted == {"__call__"}:
        call = role.members["__call__"]
        functions = [(m, node) for m in source.modules.values() for node in m.tree.body if isinstance(node, FUNCTIONS)]
        found += [f"{m.name}.{node.name}" for m, node in functions if signature(node) == signature(call)]
    return found


def implements(source: Source, cls: Class, role: Class, wanted: set[str]) -> bool:
    """Return whether `cls` itself has something of what is wanted, and with its ancestors all of it."""
    own = wanted & {*cls.members, *cls.attributes}
    if role.name in (base.name for base in source.ancestors(cls)):
        return bool(own)
    if "__call__" in own and signature(cls.members["__call__"]) != signature(role.members.get("__call__")):
        return False
    if cls.node.name == "LLMEngine":  # what it hands on looks like what it hands it to
        return False
    return role.is_protocol and bool(own) and wanted <= all_members(source, cls)


def demanded(source: Source, role: Class) -> set[str]:
    """Methods and attributes that an implementation needs."""
    roles = [role, *source.ancestors(role)]
    names = {name for cls in roles if is_abstract(cls) for name, node in cls.members.items()}
    if not role.is_protocol:
        return names
    return {name for name in names if name == "__call__" or not name.startswith("_")}


def all_members(source: Source, cls: Class) -> set[str]:
    """Members of a class and its ancestors, and the attributes that their methods set."""
    return set().union(*(set(one.members) | one.attributes for one in (cls, *source.ancestors(cls))))


def signature(node: ast.stmt | None) -> list[str]:
    """Parameters and result as they are annotated."""
    assert isinstance(node, FUNCTIONS)
    parameters = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
    return [*map(ast.unparse, parameters), ast.unparse(node.returns) if node.returns else ""]
