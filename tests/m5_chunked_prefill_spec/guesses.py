"""Helpers of the tests that verify guesses without an engine: rows of a batch, and a target that is a table."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from m1_single_request import SamplingParams, Tracer
from m1_single_request.draws import draws as stream_draws
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler, draw
from m1_single_request.sampling_metadata import SamplingRow
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.forward_batch import ranges
from m5_chunked_prefill_spec.speculative.rejection_sampler import DRAFT_STREAM, RejectionSampler
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m5_chunked_prefill_spec.speculative.verify_rows import metadata_of_rows
from tests.m1_single_request.helpers import exact_distribution
from tests.testbed.fakes import make_request

CPU = torch.device("cpu")
VOCAB = 4


def make_sampler(tracer: Tracer | None = None) -> Callable[..., ModelRunnerOutput]:
    """The real one, around m1's sampler, which gets its rows as a runner makes them."""
    sampler = RejectionSampler(sampler=Sampler(), token_text=str, tracer=tracer or Tracer())

    def sample(
        req_ids: Sequence[str], info: SamplingBatchInfo, logits: Tensor, lens: Sequence[int], drafts: Drafts
    ) -> ModelRunnerOutput:
        return sampler(req_ids, info, logits, metadata_of_rows(info, lens, drafts.token_ids), lens, drafts)

    return sample


def row_of(
    seed: int = 0,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    temperature: float = 0.0,
    **settings: Any,
) -> Request:
    """A request in the middle of its answer, as far as the sampler is concerned."""
    req = make_request(f"r{seed}", prompt, SamplingParams(temperature=temperature, **settings), seed=seed)
    req.sequence.output_token_ids.extend(output)
    return req


def info_of(*reqs: Request, vocab_size: int = VOCAB, stop_ids: Collection[int] = ()) -> SamplingBatchInfo:
    """The batch of these requests; all of them stop at `stop_ids`."""
    ends = frozenset(stop_ids)
    return SamplingBatchInfo.from_reqs(reqs, vocab_size=vocab_size, stop_ids=lambda _: ends, device=CPU)


def copies_of(req: Request, num_rows: int, *, first_seed: int = 0) -> SamplingBatchInfo:
    """The same request many times, each with a seed of its own."""
    info = info_of(req)
    info.filter_batch([0] * num_rows)
    info.seeds = list(range(first_seed, first_seed + num_rows))
    return info


def m1_rows(req: Request, said: Sequence[Sequence[int]], stop_ids: Collection[int] = ()) -> list[SamplingRow]:
    """What m1 would know of a request that has also said these tokens: one row for each of `said`."""
    sequence = req.sequence
    return [
        SamplingRow(
            req.sampling_params,
            req.seed,
            sequence.prompt_token_ids,
            [*sequence.output_token_ids, *more],
            frozenset(stop_ids),
        )
        for more in said
    ]


class Table(NamedTuple):
    """The logits of a model for the next three tokens, by what it is told of those before."""

    first: Tensor  # [vocab]
    second: Tensor  # [vocab, vocab]: row i if the first was i
    third: Tensor  # [vocab, vocab, vocab]

    @classmethod
    def random(cls, seed: int) -> "Table":
        """Some logits, none of them hopeless."""
        generator = torch.Generator().manual_seed(seed)
        return cls(*(1.5 * torch.randn(*[VOCAB] * size, generator=generator) for size in (1, 2, 3)))

    def behind(self, guesses: Tensor) -> Tensor:
        """What it says in the rows that verify `guesses` `[requests, 2]`: `[3 * requests, vocab]`."""
        one, two = guesses.unbind(-1)
        rows = [self.first.expand(len(guesses), -1), self.second[one], self.third[one, two]]
        return torch.stack(rows, dim=1).reshape(-1, VOCAB)

    def probs(self, req: Request) -> Tensor:
        """How likely `req` says each run of three tokens, float64 `[vocab, vocab, vocab]`, by m1's slow oracle."""
        firsts = [[i] for i in range(VOCAB)]
        rows = m1_rows(req, [[], *firsts, *(a + b for a in firsts for b in firsts)])
        logits = torch.cat([self.first[None], self.second, self.third.reshape(-1, VOCAB)]).tolist()
        p = torch.tensor(
            np.array(
                [
                    exact_distribution(values, row.params, row.prompt_token_ids, row.output_token_ids)
                    for values, row in zip(logits, rows, strict=True)
                ]
            )
        )
        first, second, third = p.split([1, VOCAB, VOCAB * VOCAB])
        return first[0, :, None, None] * second[:, :, None] * third.reshape(VOCAB, VOCAB, VOCAB)


def drafts_from(table: Table, info: SamplingBatchInfo) -> tuple[Tensor, Tensor]:
    """Two guesses for each row of `info`, drawn as a draft model draws them from `table`: `[requests, 2]`, and what
    they were drawn from, `[requests, 2, vocab]`."""
    guesses, drawn_from = [], []
    q = table.first.softmax(-1).expand(len(info), -1)
    for offset in range(2):
        numbers = torch.from_numpy(stream_draws(info.seeds, (info.positions + offset).tolist(), DRAFT_STREAM))
        guesses.append(draw(q, numbers))
        drawn_from.append(q)
        q = table.second.softmax(-1)[guesses[0]]
    return torch.stack(guesses, dim=1), torch.stack(drawn_from, dim=1)


def completed(runs: Sequence[Sequence[int]], probs: Tensor, seed: int) -> Tensor:
    """The runs as they would go on without guesses to three tokens each, `[runs, 3]`; `probs` as `Table.probs`."""
    rng = np.random.default_rng(seed)
    known = torch.full((len(runs), 3), -1)
    flat = torch.tensor([token_id for run in runs for token_id in run])
    lens = np.array([len(run) for run in runs])
    known[torch.from_numpy(np.repeat(np.arange(len(runs)), lens)), torch.from_numpy(ranges(0 * lens, lens))] = flat
    for place, p in enumerate((probs.sum(dim=(1, 2)).expand(len(runs), -1), probs.sum(dim=2), probs)):
        of_row = p if place == 0 else p[tuple(known[:, :place].T)]
        drawn = draw(of_row, torch.from_numpy(rng.random(len(runs))))
        known[:, place] = torch.where(known[:, place] < 0, drawn, known[:, place])
    return known


def variation(found: Tensor, probs: Tensor) -> float:
    """The total variation between the runs `found` `[n, 3]` and how likely they should be."""
    index = (found * torch.tensor([VOCAB * VOCAB, VOCAB, 1])).sum(dim=-1)
    shares = torch.bincount(index, minlength=VOCAB**3).double() / len(found)
    return float((shares - probs.flatten()).abs().sum() / 2)
