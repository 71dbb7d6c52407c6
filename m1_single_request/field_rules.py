"""Field rules: check the values of a configuration against the annotations of its fields.

    max_tokens: PositiveInt = 128
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    console: Literal["off", "summary", "verbose"] = "off"

A rule is written once, beside its field, and msgspec checks it. vLLM's configurations are pydantic's dataclasses.
"""

import sys
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from m1_single_request.errors import EngineError, shown

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # a message between processes holds 64 bits
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**63 - 1)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # not infinite


def check_fields(record: object, error: type[EngineError]) -> None:
    """Raise `error` for a number, a truth value or a choice of strings in a dataclass that breaks its annotation.

    A whole number in a `float` field becomes a `float`. The dataclass checks its other fields itself.
    """
    record_class: Any = type(record)
    for name, annotation in _annotations(record_class).items():
        object.__setattr__(record, name, valid(name, getattr(record, name), annotation, error))


def valid(name: str, value: Any, annotation: Any, error: type[EngineError]) -> Any:
    """Return `value`, converted to its annotation. Raise `error`, with its name, if it breaks the annotation."""
    try:
        return msgspec.convert(float(value) if isinstance(value, float) else value, annotation)  # NumPy's floats, too
    except (msgspec.ValidationError, UnicodeEncodeError) as problem:  # the latter for half a surrogate pair
        choices = [get_args(kind) for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
        reason = f"use {' or '.join(choices[0])}" if choices else problem
        raise error(f"{name}={shown(value)} is not valid: {reason}") from None


@cache
def _annotations(record_class: type) -> dict[str, Any]:
    annotations = get_type_hints(record_class, include_extras=True)
    return {f.name: annotations[f.name] for f in fields(record_class) if _is_plain(annotations[f.name])}


def _is_plain(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return all(map(_is_plain, get_args(annotation)))
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_origin(kind) is Literal or kind in (int, float, bool, NoneType)
