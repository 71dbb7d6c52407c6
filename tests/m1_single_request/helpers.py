"""What the unit tests of m1 share: slow oracles in plain Python and float64, tokenizers, sequences.

An oracle computes the same as the engine in the most direct way: one row, one filter, one token at a time. It imports
nothing from the part that it judges.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence as SequenceOf
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from m1_single_request import DEFAULT_MODEL, SamplingParams
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import Sequence
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow

CPU = torch.device("cpu")
Floats = SequenceOf[float] | np.ndarray

# --- statistics -------------------------------------------------------------------------------------------------------


def chi_square(counts: SequenceOf[float], expected: SequenceOf[float]) -> float:
    """Pearson's statistic. Where nothing is expected, one count makes it infinite."""
    total = 0.0
    for count, mean in zip(counts, expected, strict=True):
        if mean == 0:
            total += math.inf if count else 0.0
        else:
            total += (count - mean) ** 2 / mean
    return total


def chi_square_limit(degrees: int) -> float:
    """The value that the statistic exceeds once in 10,000 times (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def fits(counts: SequenceOf[float], probs: SequenceOf[float]) -> bool:
    """Whether counts may have been drawn from `probs`: a chi-square test at 1 in 10,000."""
    total = sum(counts)
    statistic = chi_square(counts, [total * p for p in probs])
    return statistic < chi_square_limit(max(1, sum(p > 0 for p in probs) - 1))


# --- draws ------------------------------------------------------------------------------------------------------------

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def reference_uniform(seed: int, position: int, stream: int = 0) -> float:
    """`draws.uniforms` for one pair, in Python's whole numbers."""
    word = seed & _WORD
    for part in (position, stream):
        word = _mix((word + _GOLDEN) & _WORD) ^ _mix(((part + 1) * _GOLDEN) & _WORD)
    return (_mix((word + _GOLDEN) & _WORD) >> 11) / 2**53


# --- the sampler's oracle ---------------------------------------------------------------------------------------------


def adjusted_logits(
    logits: Floats,
    params: SamplingParams,
    prompt: SequenceOf[int] = (),
    output: SequenceOf[int] = (),
    stop_ids: SequenceOf[int] = (),
) -> np.ndarray:
    """Logits after min_tokens, logit_bias and the penalties: float64 `[vocab]`."""
    values = np.array(logits, dtype=np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in stop_ids:
            values[token_id] = -math.inf
    for token_id in {*prompt, *output}:
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id in output:
        values[token_id] -= params.frequency_penalty
    for token_id in set(output):
        values[token_id] -= params.presence_penalty
    return values


def softmax(values: np.ndarray) -> np.ndarray:
    """Softmax of one row, float64."""
    powers: np.ndarray = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())


def filtered(probs: Floats, *, min_p: float = 0.0, top_k: int = -1, top_p: float = 1.0) -> np.ndarray:
    """min_p, then top_k, then top_p, each on what the one before left, renormalised. Ties: lower id first."""
    left = np.array(probs, dtype=np.float64)
    left[left < min_p * left.max()] = 0
    left /= left.sum()
    ranking = sorted(range(len(left)), key=lambda token_id: (-left[token_id], token_id))
    if top_k > 0:
        left[ranking[top_k:]] = 0
        left /= left.sum()
    if top_p < 1:
        mass = 0.0
        for place, token_id in enumerate(ranking):
            if place > 0 and mass >= top_p:
                left[token_id] = 0
            else:
                mass += left[token_id]
        left /= left.sum()
    return left


def exact_distribution(
    logits: Floats,
    params: SamplingParams,
    prompt: SequenceOf[int] = (),
    output: SequenceOf[int] = (),
    stop_ids: SequenceOf[int] = (),
) -> np.ndarray:
    """The distribution that a row's token comes from: float64 `[vocab]`. Greedy: all of it on the best token."""
    values = adjusted_logits(logits, params, prompt, output, stop_ids)
    if params.temperature < 1e-5:
        return np.asarray(np.eye(len(values))[int(values.argmax())])
    return filtered(softmax(values / params.temperature), min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)


# --- the sampler ------------------------------------------------------------------------------------------------------


def row(
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    prompt: SequenceOf[int] = (0,),
    output: SequenceOf[int] = (),
    stop_ids: SequenceOf[int] = (),
    **settings: Any,
) -> SamplingRow:
    """A row for the sampler; `settings` are `SamplingParams`."""
    return SamplingRow(params or SamplingParams(**settings), seed, prompt, output, frozenset(stop_ids))


def metadata_of(rows: SequenceOf[SamplingRow], vocab_size: int) -> SamplingMetadata:
    """The rows' parameters as tensors on the CPU."""
    return SamplingMetadata.from_rows(rows, vocab_size=vocab_size, device=CPU)


def sample(logits: Tensor | SequenceOf[SequenceOf[float]], rows: SequenceOf[SamplingRow]) -> SamplerOutput:
    """Run the sampler on `logits` `[rows, vocab]`."""
    logits = torch.as_tensor(logits)
    return Sampler()(logits, metadata_of(rows, logits.shape[-1]))


def sample_at(logits: SequenceOf[float], one: SamplingRow, uniforms: Floats) -> tuple[int, ...]:
    """The tokens of one row at random numbers chosen by the test: a batch of this row, once per number."""
    num, single = len(uniforms), metadata_of([one], len(logits))

    def repeated(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.expand(num, *value.shape[1:])
        if isinstance(value, tuple):
            return tuple(map(repeated, value)) if value and isinstance(value[0], Tensor) else value * num
        return value

    fields = {field.name: repeated(getattr(single, field.name)) for field in dataclasses.fields(single)}
    numbers = torch.tensor(np.asarray(uniforms), dtype=torch.float64)
    metadata = dataclasses.replace(single, **fields | {"uniforms": numbers})
    return Sampler()(torch.tensor([list(logits)]).expand(num, -1), metadata).token_ids


def measured_distribution(logits: SequenceOf[float], one: SamplingRow, *, num: int = 4096) -> np.ndarray:
    """What one row draws, measured with `num` evenly spread random numbers: each share is exact to about 1 / num."""
    tokens = sample_at(logits, one, (np.arange(num) + 0.5) / num)
    return np.bincount(tokens, minlength=len(logits)) / num


# --- tokenizers -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def real_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint that ships: byte-level BPE, as Qwen's."""
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


@lru_cache(maxsize=1)
def byte_tokens() -> dict[int, int]:
    """Byte value -> id of the token that is this one byte, in the shipped tokenizer.

    Byte-level BPE writes each byte as a printable character: bytes that print in Latin-1 stand for themselves, the
    others are moved, in order, to U+0100 and up (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(moved)}
    vocabulary = real_tokenizer().get_vocab()
    return {byte: vocabulary[letter] for byte, letter in letters.items()}


SENTENCEPIECE_SPECIALS = ("<unk>", "<s>", "</s>")


@lru_cache(maxsize=2)
def sentencepiece_tokenizer(metaspace: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer built as Llama-2's: a space is `▁`, one is put before every text, unknown characters fall into bytes.

    `metaspace` writes the same with the Metaspace pre-tokenizer and decoder, as newer conversions do.
    """
    words = ["▁Hello", "▁world", "▁the", "ing", "▁", *"abcdefghijklmnopqrstuvwxyz.,!"]
    pieces = [*SENTENCEPIECE_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
        pieces += [word[:end] for end in range(1, len(word) + 1)] + list(word)
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always", split=False)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SENTENCEPIECE_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


class PieceTokenizer:
    """A tokenizer for tests of what comes after it: each id is a piece of bytes that the test has chosen."""

    def __init__(self, pieces: Mapping[int, bytes], special: Iterable[int] = ()) -> None:
        self.pieces = dict(pieces)
        self.special = frozenset(special)

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        """All pieces as one text; broken bytes become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.pieces[i] for i in kept).decode("utf-8", errors="replace")


def decode_all(tokenizer: Any, ids: SequenceOf[int], *, skip_special_tokens: bool) -> str:
    """What the tokenizer itself makes of all ids at once."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)


# --- sequences --------------------------------------------------------------------------------------------------------


def sequence_of(
    pieces: Mapping[int, bytes],
    *,
    special: Iterable[int] = (),
    prompt_len: int = 3,
    output: SequenceOf[int] = (),
    **settings: Any,
) -> Sequence:
    """A sequence whose token ids have the given bytes; `output` are tokens that it holds and has read already."""
    params = SamplingParams(**settings)
    detokenizer = IncrementalDetokenizer(
        PieceTokenizer(pieces, special),  # type: ignore[arg-type]
        skip_special_tokens=params.skip_special_tokens,
    )
    sequence = Sequence("req", list(range(prompt_len)), params, detokenizer)
    for token_id in output:
        sequence.add_token_id(token_id)
        detokenizer.push(token_id)
    return sequence
