"""Engines of every milestone, built from plain settings such as `cache={"page_size": 4}`.

Nothing is imported from a milestone before its engine is built, and then only its public face: `side.py` builds engines
of other checkouts with this file.
"""

import ast
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import HERE, PACKAGES, BenchmarkError

TEXT_MODEL = HERE / "m1_single_request" / "checkpoints" / "tiny-qwen3"
SEEING_MODEL = HERE / "m6_multimodal_pd" / "checkpoints" / "tiny-qwen3-vl"
MAX_MODEL_LEN = 1024
SHAPE_0_6B = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def build(milestone: str, *, parts: Mapping[str, Any] | None = None, **settings: Mapping[str, Any]) -> Any:
    """Build an engine of a milestone. Raises `BenchmarkError` for a setting that the milestone does not have."""
    package = importlib.import_module(PACKAGES[milestone])
    configs = {}
    for name, fields in settings.items():
        config = getattr(package, f"{name.title()}Config", None)
        if config is None:
            raise BenchmarkError(f"{milestone} has no {name} settings")
        try:
            configs[f"{name}_config"] = config(**_in_its_words(milestone, config, fields))
        except TypeError as error:
            raise BenchmarkError(f"{milestone}: {error}") from error
    return package.LLMEngine(parts=parts, **configs)


def _in_its_words(milestone: str, config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `kv_tokens`, the size of the KV memory in tokens, by the milestone's own field."""
    own = dict(fields)
    if "kv_tokens" in own:
        num_tokens = own.pop("kv_tokens")
        if milestone == "m3":
            own["num_blocks"] = num_tokens // own.get("block_size", config().block_size)
        else:
            own["max_total_tokens"] = num_tokens
    return own


def has_settings(milestone: str, name: str) -> bool:
    """Return whether a milestone has settings of this name, such as `speculative`."""
    return hasattr(importlib.import_module(PACKAGES[milestone]), f"{name.title()}Config")


def parsed_settings(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read settings such as `scheduler.max_num_seqs=8`. Raises `BenchmarkError` for anything else."""
    settings: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        section, dot, name = path.partition(".")
        if not (equals and dot and section.isidentifier() and name.isidentifier()):
            raise BenchmarkError(f"the setting {assignment!r} is not of the form cache.page_size=4")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        settings.setdefault(section, {})[name] = value
    return settings


def merged(*settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Combine settings; a later value replaces an earlier one."""
    found: dict[str, dict[str, Any]] = {}
    for own in settings:
        for section, fields in own.items():
            found[section] = {**found.get(section, {}), **fields}
    return found


def parts_from(reference: str) -> Mapping[str, Any]:
    """Load the parts of `FILE.py:NAME`. Raises `BenchmarkError` if the file cannot run or has no such mapping."""
    path, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location("benchmarked_parts", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise BenchmarkError(f"the parts {reference!r} are not of the form FILE.py:NAME with a file that exists")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BenchmarkError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    parts = getattr(module, name, None)
    if not isinstance(parts, Mapping):
        raise BenchmarkError(f"{path} has no dictionary {name!r} from roles to classes")
    return parts


# --- engines of the lessons -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A checkpoint, or the shape of one with random weights."""

    name: str
    directory: Path = TEXT_MODEL
    dtype: str = "float32"
    load_format: str = "auto"


EMBEDDED, SEEING = Model("embedded"), Model("seeing", SEEING_MODEL)


def random_model(directory: Path, **changes: Any) -> Model:
    """Write the configuration of a model in the shape of Qwen3-0.6B, with random weights in bfloat16."""
    directory.mkdir(exist_ok=True)
    for path in TEXT_MODEL.iterdir():
        if path.suffix == ".json" or path.suffix == ".jinja":
            (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((TEXT_MODEL / "config.json").read_text(encoding="utf-8"))
    config |= SHAPE_0_6B | {"max_position_embeddings": MAX_MODEL_LEN, "dtype": "bfloat16"} | changes
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Model("0.6B", directory, "bfloat16", "dummy")


class Engines:
    """Engines over one copy of each model's weights, until `close`. The same arguments give the same engine."""

    def __init__(
        self, model: Model = EMBEDDED, *, max_model_len: int = MAX_MODEL_LEN, kv_bytes: int = 2**28, seed: int = 1
    ) -> None:
        self.model, self.max_model_len, self.kv_bytes, self.seed = model, max_model_len, kv_bytes, seed
        self.loaded: dict[Any, Any] = {}
        """Loaded models by loader and configuration, in their order."""
        self._engines: dict[str, Any] = {}

    def __call__(
        self,
        milestone: str,
        of: Model | None = None,
        parts: Mapping[str, Any] | None = None,
        **settings: Mapping[str, Any],
    ) -> Any:
        """Return an engine of the milestone on the CPU, of this or another model."""
        key = f"{milestone} {of} {parts} {sorted(settings.items())}"
        if key not in self._engines:
            own, parts = of or self.model, dict(parts or {})
            model: dict[str, Any] = {"model": own.directory, "device": "cpu", "dtype": own.dtype, "seed": self.seed}
            defaults = {"model": model | {"max_model_len": self.max_model_len}}
            if milestone not in ("m1", "m2"):  # their models are transformers', which m2 changes
                defaults["model"]["load_format"] = own.load_format
                if not {"num_blocks", "max_total_tokens"} & set(settings.get("cache", ())):
                    defaults["cache"] = {"kv_cache_memory_bytes": self.kv_bytes}
                if "disaggregation" not in settings:  # processes load their own
                    parts["model_loader"] = self._sharing(milestone)
            self._engines[key] = build(milestone, parts=parts, **merged(defaults, settings))
        return self._engines[key]

    def _sharing(self, milestone: str) -> Any:
        load = importlib.import_module(PACKAGES[milestone]).LLMEngine.parts["model_loader"]

        def shared(config: Any, kv_cache_dtype: Any) -> Any:
            key = load, repr(config), kv_cache_dtype
            if key not in self.loaded:
                self.loaded[key] = load(config, kv_cache_dtype)
            return self.loaded[key]

        return shared

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines, self.loaded = {}, {}
