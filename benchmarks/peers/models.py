"""The models in the formats of the engines: safetensors, GGUF, OpenVINO. Written once."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import HERE
from benchmarks.engines import TEXT_MODEL, random_model

FORMATS = {"tiny": "f32", "0.6B": "bf16"}
"""By model: the name of its precision in GGUF."""
MAX_LEN = 8192


def models(folder: Path, names: Iterable[str], pythons: Mapping[str, str]) -> dict[str, dict[str, Path]]:
    """Return the models of these names by format; for a peer that is not measured none is converted."""
    folder.mkdir(exist_ok=True, parents=True)
    return {
        name: _converted(TEXT_MODEL if name == "tiny" else _large(folder), folder / name, name, pythons)
        for name in dict.fromkeys(names)
    }


def _large(folder: Path) -> Path:
    """Return a directory with a model in the shape of Qwen3-0.6B, and random weights in bfloat16."""
    directory = folder / "qwen3-0.6B-random"
    if not (directory / "model.safetensors").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        random_model(directory, max_position_embeddings=MAX_LEN)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
        model.save_pretrained(directory)
    return directory


def _converted(source: Path, target: Path, name: str, pythons: Mapping[str, str]) -> dict[str, Path]:
    found = {"hf": source}
    if python := pythons.get("openvino"):
        for kind, precision in (("ov", []), ("ov-int8", ["--weight-format", "int8"])):
            found[kind] = folder = target.with_name(f"{target.name}-{kind}")
            if not folder.exists():
                program = str(Path(python).with_name("optimum-cli"))
                options = ["--task", "text-generation-with-past", *precision]
                subprocess.run([program, "export", "openvino", "--model", source, *options, folder], check=True)
    if python := pythons.get("llama-cpp"):
        for kind, precision in (("gguf", FORMATS[name]), ("gguf-q8_0", "q8_0")):
            found[kind] = path = target.with_name(f"{target.name}-{precision}.gguf")
            if not path.exists():
                program = HERE / "benchmarks" / "peers" / "to_gguf.py"
                subprocess.run([python, "-P", program, source, path, precision], check=True, env=dict(os.environ))
    return found
