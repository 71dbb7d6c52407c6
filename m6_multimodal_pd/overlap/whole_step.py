"""A step for the thread: what C++ reads, with the choice of its tokens if they are simply the best ones.

m3's `NativeStep` has one table of pointers for all of its steps. Two steps may be on the thread, so each of them has a
table of its own here, and keeps what the table points to. `native/whole_step.h` computes it.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampler import Sampler
from m3_paged_attention.attention.native_library import PRECISIONS, N, P
from m3_paged_attention.attention.native_linear import NativeLinear
from m3_paged_attention.attention.native_step import CLinear, CStep, NativeStep
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.row_sampler import plain_metadata
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m6_multimodal_pd.forward_batch import ForwardBatch
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from m6_multimodal_pd.overlap.choice import Choice

FORWARDS = Decoder.forward, Qwen3VLDecoder.forward
PRECISION = {getattr(torch, name): name for name in PRECISIONS}
OWN_PART = "a part of the user's chooses its tokens"


class CWholeStep(ctypes.Structure):
    """`WholeStep` of whole_step.h, with its fields in its order."""

    _fields_ = (
        ("step", CStep),
        ("input_ids", P),
        ("newest", P),
        ("head", CLinear),
        ("vocab_size", N),
        ("rows", P),
        ("tokens", P),
        ("logits", P),
    )


def takes(runner: Any, step: NativeStep, batch: Any) -> bool:
    """Return whether `step` computes all of a forward: it has no images, and runner and model add nothing."""
    is_text = not isinstance(batch, ForwardBatch) or batch.visual is None
    is_usual = type(runner).forward is ModelRunner.forward and type(runner.model).forward in FORWARDS
    return is_text and is_usual and step.takes(batch.attn_metadata)


def why_host(model: Any, sampler: Sampler, info: SamplingBatchInfo) -> str | None:
    """Return why the host chooses the tokens of a step on the thread, or None: then they are the best ones."""
    if not info.is_plain:
        return "on a CPU the host chooses tokens that are not simply the best ones"
    is_usual = (
        type(sampler).choose is Sampler.choose
        and type(model).compute_logits is Decoder.compute_logits
        and type(model.head) is NativeLinear
    )
    return None if is_usual else OWN_PART


@dataclass(eq=False)
class WholeStep:
    """A step for the thread. Keep it until the step has ended."""

    table: CWholeStep
    hidden: Tensor
    """`[total_tokens, hidden_size]`, when the step has ended."""
    choice: Choice | None
    points_to: tuple[Any, ...]

    @classmethod
    def filled(cls, runner: Any, step: NativeStep, batch: Any, newest: Tensor, rows: np.ndarray | None) -> "WholeStep":
        """Return a step of a prepared batch. `newest`: the newest token of each row of slots, int64.

        `rows`: those of the batch, one for each request, where its token is written to; None: the host chooses.
        """
        hidden = torch.empty(len(batch.input_ids), runner.model.config.hidden_size, dtype=runner.model.dtype)
        step.fill(batch.input_ids, batch.positions, batch.attn_metadata, hidden)
        pointers = {"input_ids": batch.input_ids.data_ptr(), "newest": newest.data_ptr()}
        table, choice = CWholeStep(step=CStep.from_buffer_copy(step.table), **pointers), None
        if rows is not None:
            head, count = runner.model.head, len(rows)
            tokens = torch.empty(count, dtype=torch.int64)
            logits = torch.empty(count, head.out_features, dtype=hidden.dtype)
            table.head = CLinear.of(head)
            table.vocab_size, table.rows = head.out_features, rows.ctypes.data
            table.tokens, table.logits = tokens.data_ptr(), logits.data_ptr()
            choice = Choice(logits, plain_metadata(count, tokens.device), tokens, None)
        return cls(table, hidden, choice, (runner.kv, step, batch, newest, rows))

    @property
    def function(self) -> str:
        """Return the name of the C function."""
        return f"run_step_{PRECISION[self.hidden.dtype]}"
