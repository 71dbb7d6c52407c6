"""A plain training loop: Muon for the matrices and AdamW for the rest, resumable, with a progress bar.

Batches are a pure function of (seed, step), so a resumed run sees exactly what an uninterrupted one would have seen.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

IGNORE = -100  # a label that takes no part in the loss


class Batch(NamedTuple):
    """Rows of one step, padded to one length."""

    input_ids: Tensor  # [rows, length]
    labels: Tensor  # [rows, length]
    vision: Mapping[str, Tensor] = {}  # what a model that sees is given besides: patches, grids, token types

    def to(self, device: torch.device) -> "Batch":
        seen = {name: tensor.to(device) for name, tensor in self.vision.items()}
        return Batch(self.input_ids.to(device), self.labels.to(device), seen)


@dataclass(frozen=True)
class LoopConfig:
    """What one run does. `run_dir` receives `state.pt` and `losses.json` every `save_every` steps."""

    run_dir: Path
    steps: int
    matrix_lr: float = 0.01
    vector_lr: float = 2e-3
    warmup_steps: int = 100
    decay_from: float = 0.3  # share of the run after which the cosine decay begins
    final_lr: float = 0.02  # share of the learning rate that is left at the end
    save_every: int = 200
    stop_at: float = 1.0  # share of the planned steps after which the run ends
    dtype: torch.dtype = torch.bfloat16  # of the matrix products; a very small model is faster in float32


@dataclass
class Progressing:
    """How far a run is: what a resumed one needs besides weights and optimiser states."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of all stretches of the run together, up to the last save."""


def learning_rate(config: LoopConfig, step: int) -> float:
    """Factor on the base learning rates at `step`: linear warm-up, flat, cosine decay."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    done = step / config.steps
    if done <= config.decay_from:
        return warm
    cosine = (1 + math.cos(math.pi * (done - config.decay_from) / (1 - config.decay_from))) / 2
    return warm * max(config.final_lr, cosine)


def make_optimizers(model: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon on every matrix inside the layers; AdamW on the embedding (also the tied head) and the norms."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    return [
        torch.optim.Muon(list(matrices.values()), lr=config.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


class Loss(Protocol):
    """What a run learns from: the seam between training on a text and training on another model's opinion of it."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The summed loss of a batch. `logits` `[labelled tokens, vocab]` are what `labelled_logits` returns for it."""


def labelled_logits(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Logits `[labelled tokens, vocab]`, float32, computed only where a label stands; matrix products in `dtype`."""
    with torch.autocast(batch.input_ids.device.type, dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False, **batch.vision).last_hidden_state[:, :-1]
        return model.lm_head(hidden[batch.labels[:, 1:] != IGNORE]).float()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The loss against the text itself."""
    wanted = batch.labels[:, 1:]
    return nn.functional.cross_entropy(logits, wanted[wanted != IGNORE], reduction="sum")


def backward(
    model: nn.Module,
    batches: list[Batch],
    device: torch.device,
    loss: Loss = cross_entropy,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Accumulate the gradient of the mean loss over all labelled tokens of a step; returns that mean.

    A step comes as several batches of rows of similar length, so that little is padded.
    """
    total = sum(int((batch.labels[:, 1:] != IGNORE).sum()) for batch in batches)
    mean = 0.0
    for batch in (batch.to(device) for batch in batches):
        share = loss(labelled_logits(model, batch, dtype), batch) / total
        share.backward()
        mean += share.item()
    return mean


def train(
    model: nn.Module,
    make_batches: Callable[[int], list[Any]],
    config: LoopConfig,
    *,
    device: torch.device,
    loss: Loss = cross_entropy,
    learn: Callable[[Any, list[Any], torch.device], float] | None = None,
) -> Progressing:
    """Train to the end of the run, going on from `run_dir` if a state lies there. Returns how the run went.

    `learn` accumulates the gradient of a step's batches and returns the loss; None: of dialogues, by `loss`.
    """
    learn = learn or partial(backward, loss=loss, dtype=config.dtype)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model, config)
    base_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    at = _resume(model, optimizers, config)
    began = time.monotonic() - at.seconds
    model.train()
    last = round(config.steps * config.stop_at)
    bar = Progress(
        TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("train", total=last, completed=at.step, loss=at.losses[-1] if at.losses else 0.0)
        while at.step < last:
            _set_rates(optimizers, base_lrs, learning_rate(config, at.step))
            mean = learn(model, make_batches(at.step), device)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            at.step += 1
            at.losses.append(round(mean, 4))
            bar.update(task, completed=at.step, loss=at.losses[-1])
            if at.step % config.save_every == 0 or at.step == last:
                at.seconds = time.monotonic() - began
                _save(model, optimizers, at, config)
    return at


def _set_rates(optimizers: list[torch.optim.Optimizer], base_lrs: list[list[float]], factor: float) -> None:
    for optimizer, lrs in zip(optimizers, base_lrs, strict=True):
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr * factor


def _save(model: nn.Module, optimizers: list[torch.optim.Optimizer], at: Progressing, config: LoopConfig) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "step": at.step,
        "seconds": at.seconds,
    }
    partial = config.run_dir / "state.pt.partial"
    torch.save(state, partial)
    (config.run_dir / "losses.json").write_text(json.dumps(at.losses), encoding="utf-8")
    os.replace(partial, config.run_dir / "state.pt")


def _resume(model: nn.Module, optimizers: list[torch.optim.Optimizer], config: LoopConfig) -> Progressing:
    path = config.run_dir / "state.pt"
    if not path.exists():
        return Progressing()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    losses = json.loads((config.run_dir / "losses.json").read_text(encoding="utf-8"))
    return Progressing(state["step"], losses[: state["step"]], state["seconds"])
