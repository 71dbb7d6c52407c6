"""A configuration as JSON text, for the process of an engine: the fields of its dataclasses.

Each class checks its values when it is made from the text, as it checks those of a user. A path becomes a text, which
names the same model. Readers of the trace are objects of the router's process and stay there; whether the use of
experts is recorded is sent.
"""

import json
from dataclasses import asdict, is_dataclass, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

from m3_paged_attention.config import TraceConfig
from m3_paged_attention.wiring import wants_experts


def to_json(config: Any) -> str:
    """Return a configuration dataclass as one line of JSON."""
    trace = TraceConfig(experts=wants_experts(config.trace))
    return json.dumps(asdict(replace(config, trace=trace)), default=str)


def from_json(config_type: Any, text: str) -> Any:
    """Return the configuration that `to_json` has written. Raises `ValueError` for any other text."""
    return _made(config_type, json.loads(text))


def _made(config_type: Any, values: Any) -> Any:
    hints = get_type_hints(config_type)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise ValueError(f"these are no fields of {config_type.__name__}, or not all of them")
    return config_type(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    kinds = (hint, *get_args(hint))
    config_type = next(filter(is_dataclass, kinds), None)
    if config_type is None or (value is None and NoneType in kinds):
        return tuple(value) if isinstance(value, list) else value
    return _made(config_type, value)
