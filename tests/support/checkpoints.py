"""Ways to damage a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1_single_request import ModelLoadError


def edit_json(path: Path, *, without: tuple[str, ...] = (), **values: Any) -> None:
    """Change some values of a JSON file and remove others."""
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(kept | values))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refusal_of(load: Callable[..., Any], model: Any, **settings: Any) -> str:
    """The one line that says why `load` cannot load this model. It names the model, or its end if that is long."""
    with pytest.raises(ModelLoadError) as caught:
        load(model, **settings)
    message = str(caught.value)
    assert str(model)[-230:] in message and "\n" not in message and "Traceback" not in message
    return message
