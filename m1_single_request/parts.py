"""Check the parts of a user: each must have the methods and attributes of the part that it replaces.

`LLMEngine(parts={"scheduler": MyScheduler})` replaces the class of one role for one engine. The new part is compared
with the default one before anything is loaded: its public methods (those of the abstract class, if the default part has
one) with their required arguments (if it has `__call__`, this one alone), and its constructor with all arguments. A
method that a part overrides for itself, such as `Sampler.choose`, is not compared. Attributes exist only on the built
part: those that the default class annotates, and its properties, are checked on the parts that the engine core holds.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from m1_single_request.errors import ConfigError, shown


def check_parts(parts: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown role, or for a part that cannot take the place of the default one."""
    for role, part in parts.items():
        if role not in defaults:
            raise ConfigError(f"parts: there is no role {shown(role)}; the roles are {', '.join(defaults)}")
        is_object = isinstance(defaults[role], type) and isinstance(part, defaults[role])
        if is_object or not callable(part):
            raise ConfigError(f"parts: {role!r} must be a class or a function, not {shown(part)}")
        problem = None if part is defaults[role] else _problem(part, defaults[role])
        if problem is not None:
            raise ConfigError(f"parts: {role!r}: {getattr(part, '__name__', shown(part))} {problem}")


def check_built(core: Any, defaults: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a part of the engine core lacks an attribute of its role."""
    for role, default in defaults.items():
        part = getattr(core, role, None)
        lacking = [] if part is None else [name for name in _attributes(default) if not hasattr(part, name)]
        if lacking:
            raise ConfigError(f"parts: {role!r}: {type(part).__name__} has no attribute {', '.join(lacking)}")


def _problem(part: Any, default: Any) -> str | None:
    """Return why `part` cannot take the place of `default`, or None."""
    role_class = _role_class(default)
    if isinstance(part, type) and role_class is not None:
        methods = _methods(role_class)
        lacking = [f"{name}()" for name in methods if not _has_method(part, name)]
        if lacking:
            return f"has no {', '.join(lacking)}"
        for name, method in methods.items():
            refusal = _refusal(getattr(part, name), method, only_required=True)
            if refusal is not None:
                return f"has a method {name}() that cannot be called as that of {role_class.__name__} is: {refusal}"
    refusal = _refusal(part, default)
    return refusal and f"cannot be called as the default part is: {refusal}"


def _role_class(default: Any) -> type | None:
    """Return the class that a part of this role is compared with: the abstract class of the default part, if it has
    one; if the default is a function, the class that it returns; None if it names none."""
    if not isinstance(default, type):
        returned = get_type_hints(default).get("return")
        default = next((cls for cls in (returned, *get_args(returned)) if isinstance(cls, type)), None)
    return next((cls for cls in getattr(default, "__mro__", ()) if inspect.isabstract(cls)), default)


def _methods(role_class: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class by name, inherited ones included; if it has `__call__`, this one alone."""
    members = {name: value for cls in reversed(role_class.__mro__) for name, value in vars(cls).items()}
    methods = {name: value for name, value in members.items() if inspect.isfunction(value)}
    if "__call__" in methods:
        return {"__call__": methods["__call__"]}
    return {name: method for name, method in methods.items() if not name.startswith("_")}


def _has_method(part: type, name: str) -> bool:
    """Return whether instances of `part` have this method. (A class is callable: `getattr` would find that.)"""
    return callable(next((vars(cls)[name] for cls in part.__mro__ if name in vars(cls)), None))


def _attributes(default: Any) -> list[str]:
    """Return the public attributes that the class of a default part annotates, and its properties."""
    classes = getattr(default, "__mro__", ())
    annotated = [name for cls in classes for name in vars(cls).get("__annotations__", ())]
    properties = [name for cls in classes for name, value in vars(cls).items() if isinstance(value, property)]
    return [name for name in dict.fromkeys([*annotated, *properties]) if not name.startswith("_")]


def _refusal(own: Callable[..., Any], expected: Callable[..., Any], *, only_required: bool = False) -> str | None:
    """Return why `own` cannot be called with the arguments of `expected`, all or the required ones, or None."""
    try:
        signature = inspect.signature(own)
    except ValueError:  # a built-in type has no signature
        return None
    given = [
        p for p in inspect.signature(expected).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    by_place = [p for p in given if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    by_name = {p.name: None for p in given if p not in by_place and (p.default is p.empty or not only_required)}
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        return str(error)
    return None
