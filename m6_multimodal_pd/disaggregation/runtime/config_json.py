"""A configuration as text, for a process that is being started: what its dataclasses say, and nothing else.

Each class checks its values when it is made anew, so a text that was changed on the way makes no engine that could not
have been asked for. Readers of the trace stay behind: they are objects of this process.
"""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from m1_single_request.config import TraceConfig

PATH = "path"
"""Under this name a path is told from the name of a model."""


def to_json(config: Any) -> str:
    """A configuration dataclass as JSON."""
    return json.dumps(_plain(replace(config, trace=TraceConfig())))


def from_json(config_type: type, text: str) -> Any:
    """What `to_json` has written. Raises `ValueError`, or the `ConfigError` of a class, for anything else."""
    return _made(config_type, json.loads(text))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Path):
        return {PATH: str(value)}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(one) for one in value]
    return value


def _made(config_type: type, values: Any) -> Any:
    hints = get_type_hints(config_type)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise ValueError(f"these are no fields of {config_type.__name__}, or not all of them")
    made = {}
    for name, value in values.items():
        kinds = [hints[name], *get_args(hints[name])]
        dataclasses = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
        if dataclasses and not (value is None and type(None) in kinds):
            value = _made(dataclasses[0], value)
        elif Path in kinds and isinstance(value, dict) and isinstance(value.get(PATH), str):
            value = Path(value[PATH])
        made[name] = tuple(value) if isinstance(value, list) else value
    return config_type(**made)
