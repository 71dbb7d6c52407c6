"""Flags of a command line, made of configuration classes: name, type, choices and help of a flag come from its field.

    add_flags(parser.add_argument_group("batching"), SchedulerConfig, ("max_num_seqs", "execution"))
    args = parser.parse_args()                          # knows --max-num-seqs and --execution
    config = config_of(args, SchedulerConfig, max_num_seqs=4)   # with the default of the caller, not of the class

So a field is described once, in its docstring. A flag that is not given leaves the default to the class, or to the
caller of `config_of`. vLLM: `EngineArgs`, whose help also comes from the docstrings of the fields.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def add_flags(
    group: Any, config_class: type, names: Sequence[str], spelled: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Add a flag for each of these fields. `spelled`: flags of fields that are not spelled as `--its-name`."""
    types, texts = get_type_hints(config_class), field_docs(config_class)
    defaults = {field.name: field.default for field in fields(config_class)}
    for name in names:
        flags = (spelled or {}).get(name, [f"--{name.replace('_', '-')}"])
        default = "" if defaults[name] in (None, ()) else f" Default: {defaults[name]}."
        options = {"dest": f"{config_class.__name__}.{name}", "help": f"{texts[name]}{default}".replace("%", "%%")}
        group.add_argument(*flags, **options, **_options(types[name], name))


def config_of(args: argparse.Namespace, config_class: type[T], **defaults: Any) -> T:
    """Return the configuration of the given flags. `defaults`: of fields whose flag is not given.

    Raises what the class raises for a wrong value.
    """
    start = f"{config_class.__name__}."
    given = {name.removeprefix(start): value for name, value in vars(args).items() if name.startswith(start)}
    return config_class(**defaults | {name: value for name, value in given.items() if value is not None})


def field_docs(config_class: type) -> dict[str, str]:
    """Return the first paragraph of the docstring below each field, as one line; also of inherited fields."""
    found: dict[str, str] = {}
    for cls in [cls for cls in reversed(config_class.__mro__) if "__dataclass_fields__" in vars(cls)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for statement, below in zip(body, body[1:], strict=False):
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
    if alternatives and get_origin(kind) is not tuple:  # an optional value: its first type
        return _options(str if str in alternatives else alternatives[0], name)
    options: dict[str, Any] = {"metavar": name.rsplit("_")[-1].upper()}
    if get_origin(kind) is tuple:
        return options | {"action": "append"}
    return options | {"type": kind}
