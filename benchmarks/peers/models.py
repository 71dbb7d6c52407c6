"""The models in the formats of the engines: safetensors, GGUF, OpenVINO. Each is written once, when a load needs it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import HERE
from benchmarks.engines import TEXT_MODEL, random_model

FORMATS = {"tiny": "f32", "0.6B": "bf16"}
"""By model: the name of its precision in GGUF."""
MAX_LEN = 8192


def model_path(folder: Path, name: str, engine: str, weights: str | None, python: str) -> Path:
    """Return a model in the format of an engine, which is written first if it is not there.

    `weights`: their format where it is not the model's own; `python`: the interpreter of the engine's environment.
    """
    source = TEXT_MODEL if name == "tiny" else written(folder / "qwen3-0.6B-random", _write_large)
    if engine == "llama-cpp":
        precision, program = weights or FORMATS[name], HERE / "benchmarks" / "peers" / "to_gguf.py"
        command = [python, "-P", program, source]
        return written(folder / f"{name}-{precision}.gguf", lambda path: _run([*command, path, precision]))
    if engine == "openvino":
        command = [Path(python).with_name("optimum-cli"), "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", *(["--weight-format", weights] if weights else [])]
        target = folder / (f"{name}-ov-{weights}" if weights else f"{name}-ov")
        return written(target, lambda path: _run([*command, path]))
    return source


def written(target: Path, write: Callable[[Path], object]) -> Path:
    """Return `target`. If it is not there, `write` gets another path first, so that half of a model is never used."""
    if not target.exists():
        target.parent.mkdir(exist_ok=True, parents=True)
        with TemporaryDirectory(dir=target.parent) as unfinished:
            path = Path(unfinished) / target.name
            write(path)
            path.replace(target)
    return target


def _run(command: list[str | Path]) -> None:
    subprocess.run(command, check=True)


def _write_large(directory: Path) -> None:
    """Write a model in the shape of Qwen3-0.6B, with random weights in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    random_model(directory, max_position_embeddings=MAX_LEN)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)
