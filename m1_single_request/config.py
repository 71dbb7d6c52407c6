"""Engine configuration: frozen dataclasses, validated by their constructors (`field_rules.py`).

m1 has two: the model and the trace. Later milestones add a scheduler, a cache and so on; each milestone exports exactly
the configurations that it supports. vLLM has the same split (`ModelConfig`, `SchedulerConfig`, ...).
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from msgspec import Meta

from m1_single_request.errors import ConfigError, is_unicode, shown
from m1_single_request.field_rules import Int, check_fields
from m1_single_request.tracer import TraceReader

DEFAULT_MODEL = Path(__file__).parent / "checkpoints" / "tiny-qwen3"

LONGEST_PATH = 4096  # characters
MaxModelLen = Annotated[int, Meta(ge=2, le=2**63 - 1)]  # a token of the prompt and one of the output

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, its device and its precision."""

    model: str | Path | None = None
    """A local Hugging Face directory, or a hub id such as `Qwen/Qwen3-0.6B`. None: the included checkpoint."""
    device: str = "auto"
    """A torch device. `auto`: CUDA if there is a GPU, else CPU."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`.

    `auto` on CUDA: the precision of config.json, but bfloat16 instead of float32. `auto` on a CPU: float32; bfloat16 if
    config.json names it, the weights have more than 256 MiB, and the processor multiplies bfloat16.
    """
    max_model_len: MaxModelLen | None = None
    """Maximum number of tokens of prompt plus output. None: the model's own limit."""
    seed: Int = 0
    """Seed of the engine. A request without a seed derives one from this and its number."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_path("model", self.model, "a directory or a hub id", optional=True)
        if not isinstance(self.dtype, str) or self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype={shown(self.dtype)} is unknown: use auto, {', '.join(DTYPES)}")
        self.torch_device()

    def torch_device(self) -> torch.device:
        """Return the torch device that `device` names. Raises `ConfigError` if this machine lacks it."""
        name: Any = self.device if isinstance(self.device, str | torch.device) else "meta"
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except (RuntimeError, ValueError):  # an unknown name, no valid Unicode
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda") or str(device) != str(name):  # to torch cuda:256 is cuda:0
            raise ConfigError(f"device={shown(self.device)} is not supported: use auto, cpu or cuda")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device={shown(name)}: torch finds {torch.cuda.device_count()} CUDA devices here")
        return device


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """The readers attached to the trace from the start; `engine.tracer.attach` adds others at any time."""

    console: Literal["off", "summary", "verbose"] = "off"
    """`summary`: one line per step. `verbose`: every decision in sentences."""
    jsonl: str | Path | None = None
    """Write one event per line to this file."""
    chrome: str | Path | None = None
    """Write a trace for Perfetto or chrome://tracing to this file when the engine is closed."""
    player: str | Path | None = None
    """Write a page (HTML) that replays the trace to this file when the engine is closed."""

    readers: tuple[TraceReader, ...] = ()
    """Your own readers; they also receive the events of the engine's start."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not isinstance(self.readers, tuple):
            raise ConfigError(f"readers={shown(self.readers)} must be a tuple of trace readers")
        check_path("jsonl", self.jsonl, optional=True)
        check_path("chrome", self.chrome, optional=True)
        check_path("player", self.player, optional=True)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole configuration of an m1 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


def check_path(name: str, value: Any, what: str = "a path", *, optional: bool = False) -> None:
    """Raise `ConfigError` unless `value` is a string or a `Path` and a valid file name; None is valid if `optional`."""
    if value is None and optional:
        return
    text = str(value) if isinstance(value, str | Path) else ""
    if not 0 < len(text) <= LONGEST_PATH or "\0" in text or not is_unicode(text):
        raise ConfigError(f"{name}={shown(value)} must be {what}: valid text of 1 to {LONGEST_PATH:,} characters")


def assemble_config(config_type: type, default_model: str | Path, model: Any, configs: dict[str, Any]) -> Any:
    """Build a milestone's `EngineConfig` from the keywords of `LLMEngine(model, x_config=...)`.

    Raises `ConfigError` for an unknown keyword, a value of the wrong class, or a model that is named twice.
    """
    hints = get_type_hints(config_type)
    known = {f"{f.name}_config": f for f in fields(config_type)}
    for keyword, value in configs.items():
        if keyword not in known:
            raise ConfigError(f"{keyword}= is unknown here: this milestone takes {', '.join(known)}")
        expected = hints[known[keyword].name]
        if not isinstance(value, expected):
            raise ConfigError(f"{keyword}= must be a {getattr(expected, '__name__', expected)}, not {shown(value)}")
    if model is not None and "model_config" in configs:
        raise ConfigError(f"the model is named twice: {shown(model)}, and in model_config")
    model_config = configs.get("model_config") or hints["model"](model=model)
    if model_config.model is None:
        model_config = replace(model_config, model=default_model)
    values = {known[keyword].name: value for keyword, value in configs.items()}
    return config_type(**values | {"model": model_config})
