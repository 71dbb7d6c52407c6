"""Flags of a command line, made of configuration classes: name, type, choices and help of a flag come from its field.

    add_flags(parser.add_argument_group("batching"), SchedulerConfig, "max_num_seqs execution")
    args = parser.parse_args()                          # has --max-num-seqs and --execution
    config = config_of(args, SchedulerConfig, max_num_seqs=4)   # with the default of the caller, not of the class

So a field is described once, in its docstring. A flag that is not given leaves the default to the class, or to the
caller of `config_of`. vLLM: `EngineArgs`, whose help also comes from the docstrings of the fields.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def add_flags(group: Any, config_class: type, names: str) -> None:
    """Add a flag for each of these fields; for `field=--one,--two` these flags, in place of `--field`."""
    types, texts = get_type_hints(config_class), field_docs(config_class)
    values = {field.name: field.default for field in fields(config_class)}
    for name, _, spelled in (each.partition("=") for each in names.split()):
        flags = spelled.split(",") if spelled else [f"--{name.replace('_', '-')}"]
        default = "" if values[name] in (None, ()) else f" Default: {values[name]}."
        text = f"{texts[name]}{default}".replace(" None: ", " Default: ").replace("%", "%%")
        dest = f"{config_class.__name__}.{name}"
        group.add_argument(*flags, dest=dest, help=text, **_options(types[name], name))


def config_of(args: argparse.Namespace, config_class: type[T], **defaults: Any) -> T:
    """Return the configuration of the given flags. `defaults`: of fields whose flag is not given.

    Raises what the class raises for a wrong value.
    """
    return config_class(**defaults | given(args, config_class))


def given(args: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """Return the values of the flags of this class that are given, by field."""
    names = [field.name for field in fields(config_class)]
    found = {name: getattr(args, f"{config_class.__name__}.{name}", None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def field_docs(config_class: type) -> dict[str, str]:
    """Return the first paragraph of the docstring below each field, as one line; also of inherited fields."""
    found: dict[str, str] = {}
    for cls in [cls for cls in reversed(config_class.__mro__) if "__dataclass_fields__" in vars(cls)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for statement, below in pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split("\n\n")[0].split()).replace("`", "")
    return found


def _options(kind: Any, name: str) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    alternatives = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) is Literal:
        return {"choices": alternatives}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) in (tuple, Sequence):
        return {"action": "append", "metavar": name.rsplit("_")[-1].upper()}
    if alternatives:  # a sequence, if one of them is; else the first, a string for a path
        return _options(next((each for each in alternatives if get_origin(each) is Sequence), alternatives[0]), name)
    metavar = name.rsplit("_")[-1].upper()
    return {"metavar": metavar, "type": byte_count if metavar == "BYTES" else kind}


def byte_count(text: str) -> int:
    """Return the number of bytes of a text such as `65536` or `64MiB`."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        return int(text.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 65536 or 64MiB") from error
