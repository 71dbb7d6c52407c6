"""Weights of eight bits (int8 quantization): integers, and a scale for every 128 inputs of an output feature.

One stream is as fast as its weights are read, so half the bytes of bfloat16 make it faster. Only the weights
of linear layers are quantized; the native kernels round hidden states to 16 bits. It is done while the files are read,
tensor by tensor, so the whole model is never in memory in its own precision. The largest error of a weight is 1/254 of
the largest weight in its group. llama.cpp: `Q8_0`, with groups of 32; vLLM: `quantization/`; SGLang: `w8a8_int8`, which
also quantizes the hidden states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 128
"""Inputs that share a scale; `SCALE_GROUP` of int8.h. Groups of 32, on the torch backend, change log-probabilities a
fifth less, and read 9 % more bytes (`benchmarks quantized`)."""
AT_ONCE = 2**20
"""Maximum number of weights that are converted at a time, so that no second copy of a large one is needed."""


@dataclass(frozen=True)
class Int8Weight:
    """Quantized weight of a linear layer. In the tables of weights it takes the place of a tensor."""

    values: Tensor
    """int8 `[out_features, in_features]`, from -127 to 127."""
    scales: Tensor
    """float32 `[out_features, ceil(in_features / GROUP_SIZE)]`."""
    dtype: torch.dtype
    """Precision of the layer's inputs and outputs."""

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> "Int8Weight":
        """Return an uninitialised weight."""
        values = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        scales = torch.empty(out_features, -(-in_features // GROUP_SIZE), device=device)
        return cls(values, scales, dtype)

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Weight":
        """Return the quantized form of a weight `[out_features, in_features]`."""
        quantized = cls.empty(weight.shape[0], weight.shape[1], weight.dtype, weight.device)
        quantized.copy_(weight)
        return quantized

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)

    def __len__(self) -> int:
        return len(self.values)

    def split_with_sizes(self, sizes: list[int]) -> list["Int8Weight"]:
        """Return views of so many output features each."""
        parts = zip(self.values.split_with_sizes(sizes), self.scales.split_with_sizes(sizes), strict=True)
        return [Int8Weight(values, scales, self.dtype) for values, scales in parts]

    def rows_at_once(self) -> list[slice]:
        """Return slices of the output features, each of at most `AT_ONCE` weights."""
        step = max(1, AT_ONCE // self.shape[1])
        return [slice(start, start + step) for start in range(0, len(self), step)]

    def copy_(self, weight: "Tensor | Int8Weight") -> None:
        """Overwrite it by the quantized form of `weight`, first rounded to `dtype`, or by one that is quantized.

        A group with a number that is not finite is read as NaN.
        """
        if isinstance(weight, Int8Weight):
            self.values.copy_(weight.values)
            self.scales.copy_(weight.scales)
            return
        for rows in self.rows_at_once():
            exact = _grouped(weight[rows].to(self.scales.device, self.dtype).float())
            scales = exact.abs().amax(-1, keepdim=True) / 127
            steps = exact / scales.clamp(min=torch.finfo(torch.float32).tiny)
            self.values[rows] = steps.nan_to_num_(0.0).round_().flatten(1)[:, : self.shape[1]]
            self.scales[rows] = scales[..., 0].where(scales[..., 0].isfinite(), torch.nan)

    def dequantized(self, rows: slice) -> Tensor:
        """Return some output features as float32 `[rows, in_features]`."""
        values = _grouped(self.values[rows].float())
        return values.mul_(self.scales[rows, :, None]).flatten(1)[:, : self.shape[1]]


Weight = Tensor | Int8Weight
"""Weight of a linear layer. Another format would be another class with the methods of `Int8Weight`."""


def _grouped(weight: Tensor) -> Tensor:
    """Return `[out_features, groups, GROUP_SIZE]`, with zeros where the last group has fewer inputs."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP_SIZE))
    return padded.view(len(weight), -1, GROUP_SIZE)
