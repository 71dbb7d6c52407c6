"""Sampler: choose one token per row of logits, for any number of rows at once.

The order is fixed, as in vLLM; each filter acts on the tokens that the filter before it kept:

    logits -> min_tokens, logit_bias -> penalties -> greedy? take the best
                                                  -> temperature -> min_p -> top_k -> top_p -> draw

Log-probabilities are those of the unmodified logits. A draw adds up the probabilities in the order of token ids, and
takes the token at which the sum exceeds the row's own random number (`draws.py`), as a share of the total. The order
of the additions is fixed (`running_sums.py`), so a row's token depends neither on the other rows nor on the run. All
tensors as long as the vocabulary are float32. vLLM: `v1/sample/sampler.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m1_single_request.errors import ForwardError, shown
from m1_single_request.running_sums import search_running_sums
from m1_single_request.sampling_metadata import SamplingMetadata, sent
from m1_single_request.sampling_params import SamplingParams

LARGEST = torch.finfo(torch.float32).max  # two infinite logits would make the softmax undefined


@dataclass(frozen=True)
class LogprobRow:
    """Log-probabilities at one position, as parallel tuples: first the token at that position, then the best tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row, and its log-probabilities where the request asks for them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobRow | None, ...]
    impossible_rows: tuple[int, ...] = ()
    """Rows in which every token has probability zero: their entries above are invalid."""


@dataclass(frozen=True)
class SampledTokens:
    """The tokens sampled for one request in one step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobRow | None, ...]
    prompt_logprobs: tuple[LogprobRow, ...] | None = None
    """For the prompt's tokens after the first; with the prefill, if requested."""


class Sampler:
    """Stateless sampler: all parameters come in the metadata.

    The engine calls it as a function. A subclass can override `choose` alone.
    """

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose one token per row of `logits` `[rows, vocab]`, of any float type. Does not modify `logits`."""
        logits = logits.float()
        tokens = self.choose(logits, metadata)
        columns = asked_logprobs(logits, tokens, metadata) if metadata.num_logprobs else ()
        return sampler_output(tokens, columns, metadata, logits.shape[-1])

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return one token id per row of float32 `logits` `[rows, vocab]`; `vocab` where no token is possible."""
        logits = adjusted(logits, metadata)
        best, is_chosen = best_tokens(logits), metadata.greedy
        if metadata.bias is not None:  # only a bias can forbid every token
            impossible = logits.gather(-1, best[:, None])[:, 0].isneginf()
            best = best.masked_fill(impossible, logits.shape[-1])
            is_chosen = is_chosen | impossible
            logits = logits.masked_fill(impossible[:, None], 0.0)  # any distribution will do
        if metadata.all_greedy:
            return best
        assert metadata.uniforms is not None  # there is a row that draws
        drawn = draw(filtered_probs(logits, metadata), metadata.uniforms)
        return torch.where(is_chosen, best, drawn)


def best_tokens(logits: Tensor) -> Tensor:
    """Return the `argmax` of each row of `logits` `[rows, vocab]`.

    On a CPU NumPy computes it: it uses vector instructions, and torch, which does not, takes ten times as long.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.numel():
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def adjusted(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the logits with bias and penalties, from which greedy rows choose. `[rows, vocab]` in and out."""
    if metadata.bias is not None:
        logits = logits + metadata.bias
    return logits if metadata.penalties is None else apply_penalties(logits, metadata)


def apply_penalties(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Apply repetition (prompt and output), then frequency and presence (output). `[rows, vocab]` in and out."""
    assert metadata.penalties is not None and metadata.seen is not None and metadata.output_counts is not None
    repetition, frequency, presence = (penalty[:, None] for penalty in metadata.penalties)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(metadata.seen, scaled, logits)
    logits = logits.clamp(max=LARGEST)
    return logits - frequency * metadata.output_counts - presence * (metadata.output_counts > 0)


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the probabilities to draw from: `logits` `[rows, vocab]` / temperature, then min_p, top_k, top_p in turn.

    They are relative to the best token of the row, whose value is 1: a division by their sum would only round them. Of
    the best tokens, which are sorted once, top_k and top_p keep a number each.
    """
    probs = (logits / metadata.temperature[:, None]).clamp_(max=LARGEST)
    probs = probs.sub_(probs.amax(dim=-1, keepdim=True)).exp_()
    if metadata.min_p is not None:
        probs.masked_fill_(probs < metadata.min_p[:, None], 0.0)
    if metadata.top_k is None and metadata.top_p is None:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    if metadata.top_k is not None:
        ranked.masked_fill_(rank >= metadata.top_k[:, None], 0.0)
    if metadata.top_p is not None:
        last = search_running_sums(ranked, metadata.top_p, right=False)
        last = last.masked_fill(metadata.top_p >= 1, probs.shape[-1])
        ranked.masked_fill_(rank > last[:, None], 0.0)
    return probs.scatter_(-1, order, ranked)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token per row whose cumulative probability exceeds the fraction `uniforms` `[rows]`.

    `probs` `[rows, vocab]`, none above 1, need not sum to one. A token of probability zero is never drawn.
    """
    return search_running_sums(probs, uniforms, right=True)


def asked_logprobs(logits: Tensor, tokens: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, ...]:
    """Return the columns of `logprob_columns` for the rows that ask for log-probabilities, one or more."""
    assert metadata.num_logprobs is not None
    asked = {i: k for i, k in enumerate(metadata.num_logprobs) if k is not None}
    index = sent(torch.tensor(list(asked)), logits.device)
    possible = tokens[index].clamp(max=logits.shape[-1] - 1)
    return logprob_columns(logits[index], possible, max(asked.values()))


def sampler_output(
    tokens: Tensor, columns: tuple[Tensor, ...], metadata: SamplingMetadata, vocab_size: int
) -> SamplerOutput:
    """Read the chosen tokens `[rows]`, as of `choose`, and the `columns` of `asked_logprobs`, if a row asks for them:
    waits for the device."""
    token_ids = tuple(tokens.tolist())
    logprobs: list[LogprobRow | None] = [None] * len(token_ids)
    if metadata.num_logprobs is not None:
        asked = [(i, k) for i, k in enumerate(metadata.num_logprobs) if k is not None]
        for (i, k), row in zip(asked, logprob_rows(columns), strict=True):
            logprobs[i] = LogprobRow(row.token_ids[: k + 1], row.logprobs[: k + 1], row.ranks[: k + 1])
    impossible: tuple[int, ...] = ()
    if max(token_ids, default=0) >= vocab_size:
        impossible = tuple(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
    return SamplerOutput(token_ids, tuple(logprobs), impossible)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_best: int) -> list[LogprobRow]:
    """Return log-probabilities of `token_ids` `[rows]` and of the `num_best` best tokens. `logits` `[rows, vocab]`."""
    return logprob_rows(logprob_columns(logits, token_ids, num_best))


def logprob_columns(logits: Tensor, token_ids: Tensor, num_best: int) -> tuple[Tensor, ...]:
    """Return the log-probabilities of `gather_logprobs` as tensors: the token of each row, its log-probability and its
    rank, `[rows]`, then the best tokens and theirs, `[rows, num_best]`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs >= own).sum(dim=-1)
    best, best_ids = logprobs.topk(min(num_best, logprobs.shape[-1]), dim=-1)
    return token_ids, own[:, 0], ranks, best_ids, best


def logprob_rows(columns: tuple[Tensor, ...]) -> list[LogprobRow]:
    """Read the columns of `logprob_columns`."""
    return [
        LogprobRow((token, *ids), (value, *values), (rank, *range(1, len(ids) + 1)))
        for token, value, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True)
    ]


def prompt_logprobs(params: SamplingParams, token_ids: Sequence[int], logits: Tensor) -> tuple[LogprobRow, ...] | None:
    """Return the log-probabilities of a prompt's tokens after the first, from its `logits` `[tokens, vocab]`.

    None if the request does not ask for them.
    """
    if params.prompt_logprobs is None:
        return None
    targets = torch.tensor(token_ids[1:], device=logits.device)
    return tuple(gather_logprobs(logits[:-1], targets, params.prompt_logprobs)) if len(targets) else ()


def not_finite(request_id: str) -> ForwardError:
    """Return the error of a request with logits that are not finite."""
    return ForwardError(f"the model computed NaN or infinite logits for request {shown(request_id)}")


def impossible_row(request_id: str) -> ForwardError:
    """Return the error of a request whose settings forbid every token."""
    return ForwardError(
        f"no token can be sampled for {shown(request_id)}: its settings leave every token at probability zero"
    )
