"""Rule 2: how a milestone builds on an earlier one's classes."""

import ast
from collections.abc import Iterator

from tests.structure.sources import FUNCTIONS, Class, Finding, Source, last_name

MAX_STEPS = 2
VERBS = ("schedule", "update_from_output")
RECORD_BASES = ("Enum", "IntEnum", "StrEnum", "Exception", "NamedTuple", "TypedDict", "Struct", "Event", "Protocol")


def inheritance_takes_two_steps(source: Source) -> Iterator[Finding]:
    """A chain of classes with behaviour has at most two steps from one milestone into another."""
    for cls in source.classes.values():
        steps = num_steps(source, cls)
        if steps > MAX_STEPS and not is_record(source, cls):
            yield Finding(
                cls.name, cls.at, f"{cls.name} inherits in {steps} steps across milestones, at most {MAX_STEPS}"
            )


def verbs_are_written_out(source: Source) -> Iterator[Finding]:
    """A scheduler's verbs do not hand on to the method that they replace."""
    for cls in source.classes.values():
        for node in ast.walk(cls.node):
            if isinstance(node, ast.Attribute) and node.attr in VERBS:
                is_super = isinstance(node.value, ast.Call) and last_name(node.value.func) == "super"
                ancestors = [base.name for base in source.ancestors(cls)]
                if is_super or source.full_name(cls.module, node.value) in ancestors:
                    name = f"{cls.name}.{node.attr}"
                    yield Finding(name, f"{cls.module.name}:{node.lineno}", f"{name} calls the {node.attr} it replaces")


def overriding_is_named(source: Source) -> Iterator[Finding]:
    """The docstring of a class names the methods of an earlier milestone's class that it replaces."""
    for cls in source.classes.values():
        if is_record(source, cls):
            continue
        documentation = ast.get_docstring(cls.node) or ""
        for name, node in cls.members.items():
            replaced = [b for b in source.ancestors(cls) if b.package != cls.package and b.implements(name)]
            if replaced and not name.startswith("__") and name != "check_invariants" and name not in documentation:
                text = f"{cls.name} does not name {name} of {replaced[0].name}, which it replaces"
                yield Finding(f"{cls.name}.{name}", f"{cls.module.name}:{node.lineno}", text)


def there_are_no_mixins(source: Source) -> Iterator[Finding]:
    """At most one base has behaviour, and no class is made to be another's second base."""
    for cls in source.classes.values():
        bases = [base for base in source.bases(cls) if not base.is_protocol and behaves(source, base)]
        if cls.node.name.endswith("Mixin") or len(bases) > 1:
            yield Finding(cls.name, cls.at, f"{cls.name} is or has a mixin")


def engines_add_calls(source: Source) -> Iterator[Finding]:
    """`LLMEngine` is written once; a later one sets attributes and adds the calls of its idea."""
    for cls in source.classes.values():
        earlier = [b for b in source.ancestors(cls) if b.package != cls.package and b.node.name == "LLMEngine"]
        for name, node in cls.members.items():
            if any(isinstance(node, FUNCTIONS) and base.implements(name) for base in earlier):
                text = f"{cls.name} replaces {name} of an earlier LLMEngine"
                yield Finding(f"{cls.name}.{name}", f"{cls.module.name}:{node.lineno}", text)


def events_are_extended(source: Source) -> Iterator[Finding]:
    """An event with the name of an earlier milestone's event inherits from it: one class per thing that happens."""
    events = [cls for cls in source.classes.values() if is_event(source, cls)]
    for cls in events:
        earlier = [one for one in events if one.node.name == cls.node.name and one.package < cls.package]
        if earlier and not any(one in source.ancestors(cls) for one in earlier):
            yield Finding(cls.name, cls.at, f"{cls.name} is defined again, and does not extend {earlier[-1].name}")


INHERITANCE = (
    events_are_extended,
    inheritance_takes_two_steps,
    verbs_are_written_out,
    overriding_is_named,
    there_are_no_mixins,
    engines_add_calls,
)


def num_steps(source: Source, cls: Class) -> int:
    """The most steps from one milestone into another on a way from `cls` to an ancestor."""
    ways = [num_steps(source, base) + (base.package != cls.package) for base in source.bases(cls)]
    return max(ways, default=0)


def is_event(source: Source, cls: Class) -> bool:
    """Return whether it or an ancestor inherits from a class called `Event`."""
    return any(last_name(base) == "Event" for one in (cls, *source.ancestors(cls)) for base in one.node.bases)


def is_record(source: Source, cls: Class) -> bool:
    """Return whether it or an ancestor is a dataclass, an event, an error or a message, or it has no methods."""
    classes = [cls, *source.ancestors(cls)]
    if any("dataclass" in ast.unparse(decorator) for one in classes for decorator in one.node.decorator_list):
        return True
    if any(last_name(base) in RECORD_BASES for one in classes for base in one.node.bases):
        return True
    return not behaves(source, cls)


def behaves(source: Source, cls: Class) -> bool:
    """Return whether it or an ancestor has a method."""
    return any(isinstance(node, FUNCTIONS) for one in (cls, *source.ancestors(cls)) for node in one.members.values())
