"""Sampling parameters of a batch that is kept from step to step.

m1 to m3 collect the parameters of all rows for every step, and with penalties count all earlier tokens again. Here they
are collected once, when requests join. A step adds its tokens, a request that ends takes its row out, and a prefilled
batch is merged with its rows as they are. A tensor that no row needs stays None. The `SamplingMetadata` is the same, to
the last bit. SGLang: `sampling/sampling_batch_info.py` (`SamplingBatchInfo.from_schedule_batch`, `filter_batch`,
`merge_batch`); the token history is that of its penalizers and their orchestrator (`sampling/penaltylib`).
"""

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.request import Request, Sequence
from m1_single_request.sampling_metadata import (
    SamplingMetadata,
    SamplingRow,
    bias_of,
    choice_of,
    num_logprobs_of,
    output_counts_of,
    penalties_of,
    seen_by,
)
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.row_sampler import is_plain, plain_metadata

NUMBERS = np.dtype(
    [
        ("greedy", np.bool_),
        ("temperature", np.float32),  # 1 in greedy rows, whose filters keep every token
        ("min_p", np.float32),
        ("top_k", np.int64),  # the vocabulary size where all tokens are kept
        ("top_p", np.float32),
        ("penalised", np.bool_),  # True if any of the next three changes a logit
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ]
)
"""The numeric sampling parameters of one row."""


def numbers_of(params: SequenceOf[SamplingParams], vocab_size: int) -> np.ndarray:
    """Return the parameters as `NUMBERS`, one record per row."""
    rows = [(p.is_greedy, *choice_of(p, vocab_size), p.has_penalties, *penalties_of(p)) for p in params]
    return np.array(rows, dtype=NUMBERS)


def metadata_of(
    numbers: np.ndarray,
    *,
    num_logprobs: tuple[int | None, ...] | None,
    vocab_size: int,
    uniforms: Tensor | None,
    bias: Tensor | None,
    seen: Tensor | None,
    output_counts: Tensor | None,
) -> SamplingMetadata:
    """Build the tensors from `NUMBERS` `[rows]`, on the host; the caller passes those that depend on earlier tokens."""

    def column(name: str) -> Tensor:
        return torch.from_numpy(numbers[name].copy())

    def penalties() -> tuple[Tensor, Tensor, Tensor]:
        return column("repetition_penalty"), column("frequency_penalty"), column("presence_penalty")

    return SamplingMetadata(
        greedy=column("greedy"),
        all_greedy=bool(numbers["greedy"].all()),
        temperature=column("temperature"),
        uniforms=uniforms,
        min_p=column("min_p") if (numbers["min_p"] > 0).any() else None,
        top_k=column("top_k") if (numbers["top_k"] < vocab_size).any() else None,
        top_p=column("top_p") if (numbers["top_p"] < 1).any() else None,
        bias=bias,
        penalties=penalties() if numbers["penalised"].any() else None,
        seen=seen,
        output_counts=output_counts,
        num_logprobs=num_logprobs,
    )


@dataclass(kw_only=True, eq=False)
class SamplingBatchInfo:
    """One row per request of a batch: lists, arrays and tensors only, so it could be sent to another process.

    `advance` adds the tokens of a step. Arrays are `[rows]`; tensors are `[rows, vocab]`, on the logits' device.
    """

    vocab_size: int
    device: torch.device
    params: list[SamplingParams]
    seeds: list[int]
    positions: np.ndarray  # int64: output tokens so far, which is the position of the next one
    numbers: np.ndarray  # NUMBERS: the values of the tensors
    plain: np.ndarray  # bool: greedy, without any change of the logits and without log-probabilities
    blocked_until: np.ndarray  # int64: stop ids are forbidden before this position; 0 if none is
    bias: Tensor | None  # float32; None if no row has a bias
    seen: Tensor | None  # bool; None without penalties, False in rows without
    output_counts: Tensor | None  # float32; likewise
    is_plain: bool = field(init=False)
    """Whether all rows are plain; then only the positions are updated."""
    newest: SamplingMetadata | None = field(init=False, default=None)
    """The last `metadata`, but for its random numbers; None: the rows have changed since."""

    def __post_init__(self) -> None:
        self.is_plain = bool(self.plain.all())

    @classmethod
    def from_reqs(
        cls,
        reqs: SequenceOf[Request],
        *,
        vocab_size: int,
        stop_ids: Callable[[Sequence], frozenset[int]],
        device: torch.device,
    ) -> "SamplingBatchInfo":
        """Build the rows of requests to prefill, in their order. `vocab_size` is that of the logits.

        The history of a row is its prompt and its output so far, so a retracted request keeps its penalties.
        """
        rows = [req.sampling_row(stop_ids(req.sequence)) for req in reqs]
        params = [row.params for row in rows]
        has_penalties = any(p.has_penalties for p in params)
        blocked_until = [row.params.min_tokens if row.stop_ids else 0 for row in rows]
        return cls(
            vocab_size=vocab_size,
            device=device,
            params=params,
            seeds=[row.seed for row in rows],
            positions=np.array([len(row.output_token_ids) for row in rows], dtype=np.int64),
            numbers=numbers_of(params, vocab_size),
            plain=np.array([is_plain(p) for p in params], dtype=np.bool_),
            blocked_until=np.array(blocked_until, dtype=np.int64),
            bias=bias_of(rows, vocab_size, device),
            seen=seen_by(rows, vocab_size, device) if has_penalties else None,
            output_counts=output_counts_of(rows, vocab_size, device) if has_penalties else None,
        )

    def __len__(self) -> int:
        return len(self.params)

    def metadata(self) -> SamplingMetadata:
        """Return this step's parameters for the sampler. Valid until `advance`, which changes the same tensors.

        The random numbers are on the host: they move with the step. The rest is on the device; it is copied there, by
        a copy of its own, in a step whose rows are not those of the step before.
        """
        if self.is_plain:
            return plain_metadata(len(self.params), self.device)
        draws = None
        if not self.numbers["greedy"].all():
            draws = torch.from_numpy(uniforms(self.seeds, self.positions.tolist()))
        if self.newest is None:
            columns = metadata_of(
                self.numbers,
                num_logprobs=num_logprobs_of(self.params),
                vocab_size=self.vocab_size,
                uniforms=None,
                bias=self.bias,
                seen=self.seen,
                output_counts=self.output_counts,
            )
            self.newest = to_device(columns, self.device)
        return replace(self.newest, uniforms=draws, bias=self.bias)

    def advance(self, token_ids: SequenceOf[int] | np.ndarray | Tensor, counts: np.ndarray | int) -> None:
        """Add the newest tokens to the rows, in place.

        `token_ids`: those of the first row, then those of the next one; a tensor is on the device already. They are
        counted for penalties, so without `seen` there may be none. `counts`: number of tokens per row; int64 `[rows]`,
        or one number for all rows.
        """
        before = self.positions
        self.positions = before + counts
        if self.is_plain:
            return
        if self.bias is not None:
            self._allow_stops(self.bias, before)
        if self.seen is not None and self.output_counts is not None:
            assert len(token_ids) == (self.positions - before).sum()
            owners = np.repeat(np.arange(len(self.params)), counts)
            counted = np.flatnonzero(self.numbers["penalised"][owners])
            if not isinstance(token_ids, Tensor):
                token_ids = torch.from_numpy(np.array(token_ids, dtype=np.int64))
            places = torch.from_numpy(owners[counted]), torch.from_numpy(counted)
            rows, counted_ids, token_ids = to_device((*places, token_ids), self.device)
            where = rows, token_ids[counted_ids]
            self.seen[where] = True
            self.output_counts.index_put_(where, self.output_counts.new_ones(()), accumulate=True)

    def filter_batch(self, keep_indices: SequenceOf[int] | np.ndarray) -> None:
        """Keep these rows, in this order."""
        keep = np.asarray(keep_indices, dtype=np.int64)
        kept = keep.tolist()
        self.params = [self.params[i] for i in kept]
        self.seeds = [self.seeds[i] for i in kept]
        self.positions, self.numbers = self.positions[keep], self.numbers[keep]
        self.plain, self.blocked_until = self.plain[keep], self.blocked_until[keep]
        if not self.is_plain:
            index = to_device(torch.from_numpy(keep), self.device)
            self.bias = _rows_of(self.bias, index)
            self.seen = _rows_of(self.seen, index)
            self.output_counts = _rows_of(self.output_counts, index)
            self._drop_unused()
        self._rows_changed()

    def merge_batch(self, other: "SamplingBatchInfo") -> None:
        """Append a copy of the rows of `other`."""
        assert self.vocab_size == other.vocab_size and self.device == other.device
        counts = (len(self.params), len(other))
        self.bias = _joined(self.bias, other.bias, counts)
        self.seen = _joined(self.seen, other.seen, counts)
        self.output_counts = _joined(self.output_counts, other.output_counts, counts)
        self.params = self.params + other.params
        self.seeds = self.seeds + other.seeds
        self.positions = np.concatenate([self.positions, other.positions])
        both = self.numbers.tobytes() + other.numbers.tobytes()  # NumPy itself joins records thirty times as slowly
        self.numbers = np.frombuffer(both, dtype=self.numbers.dtype)
        self.plain = np.concatenate([self.plain, other.plain])
        self.blocked_until = np.concatenate([self.blocked_until, other.blocked_until])
        self._rows_changed()

    def _rows_changed(self) -> None:
        self.is_plain = bool(self.plain.all())
        self.newest = None

    def _allow_stops(self, bias: Tensor, before: np.ndarray) -> None:
        """Allow stop ids again in rows that have reached their min_tokens since `before`; their logit_bias stays."""
        due = np.flatnonzero((before < self.blocked_until) & (self.positions >= self.blocked_until)).tolist()
        for i in due:
            own = bias_of([SamplingRow(self.params[i], self.seeds[i], (), ())], self.vocab_size, self.device)
            bias[i] = 0.0 if own is None else own[0]
        if due:
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the tensors that no row needs any more."""
        if self.bias is not None and not (self.positions < self.blocked_until).any():
            self.bias = self.bias if any(p.logit_bias for p in self.params) else None
        if not self.numbers["penalised"].any():
            self.seen = self.output_counts = None


def _rows_of(tensor: Tensor | None, index: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(0, index)


def _joined(first: Tensor | None, second: Tensor | None, counts: tuple[int, int]) -> Tensor | None:
    """Return the rows of both tensors; in place of a missing tensor its `counts` zero rows, which change no logit."""
    if first is None and second is None:
        return None
    sides = zip((first, second), counts, strict=True)
    known = first if first is not None else second
    assert known is not None
    return torch.cat([known.new_zeros(count, known.shape[1]) if side is None else side for side, count in sides])
