"""Contract of the rejection sampler of m5: which drafts are accepted, and what takes the place of the others.

Shares of many draws are compared with the distribution that they must have, by a sum of squares as in a chi-square
test. The seeds are fixed, so a result never changes from run to run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from m1_single_request.draws import draws as stream_draws
from m1_single_request.sampler import Sampler
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.speculative.rejection_sampler import ACCEPT_STREAM, distribution
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m5_chunked_prefill_spec.speculative.verify_rows import metadata_of_rows
from tests.contracts.part import Broken, Part, same
from tests.m5_chunked_prefill_spec.guesses import copies_of, info_of, row_of

PART = Part(
    name="rejection_sampler",
    target="m5_chunked_prefill_spec.speculative.rejection_sampler:RejectionSampler",
    lesson="docs/m5_chunked_prefill_spec.md#rejectionsampler-which-guesses-are-accepted",
    starter="MyRejectionSampler",
    role="rejection_sampler",
    variant="m5_chunked_prefill_spec-ngram",
)

VOCAB, MANY = 4, 1000
P, Q = [0.4, 0.4, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]
NEXT = [0.1, 0.2, 0.3, 0.4]
"""The target's distribution behind an accepted draft."""
NEAR_ONE = 1405514
"""A seed whose first number in `ACCEPT_STREAM` is above 1 - 1e-7."""


def verified(
    part: Any,
    info: SamplingBatchInfo,
    logits: Tensor,
    drafts: Sequence[Sequence[int]],
    probs: Tensor | None = None,
    lens: Sequence[int] | None = None,
) -> ModelRunnerOutput:
    """The output of a step with one request for each row of `info`. `lens`: rows of logits of each request."""
    sampler = part(sampler=Sampler(), token_text=str, tracer=Tracer())
    lens = [len(each) + 1 for each in drafts] if lens is None else lens
    req_ids = [f"r{number}" for number in range(len(drafts))]
    rows = Drafts([list(each) for each in drafts], probs)
    output: ModelRunnerOutput = sampler(req_ids, info, logits, metadata_of_rows(info, lens, rows.token_ids), lens, rows)
    return output


def greedy(part: Any, drafts: Sequence[Sequence[int]], best: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The tokens by request; `best`: the best token in each row of each request, `[]` for a piece of a prompt."""
    logits = torch.eye(VOCAB)[[token_id for row in best for token_id in row]]
    info = info_of(*(row_of() for _ in drafts))
    output = verified(part, info, logits, drafts, lens=[len(row) for row in best])
    return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def same_greedy(part: Any, drafts: list[int], best: list[int], expected: list[int], hint: str) -> None:
    """Compare the tokens of one greedy request."""
    on = f"drafts {drafts}; the target's tokens in the rows {best}"
    same(greedy(part, [drafts], [best]), {"r0": expected}, on=on, hint=hint)


def drawn(
    part: Any,
    drafts: Sequence[Sequence[int]],
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    *,
    first_seed: int = 0,
) -> list[list[int]]:
    """The tokens of requests that draw, each with a seed of its own; all have the same rows `p`, one more than `q`."""
    info = copies_of(row_of(temperature=1.0), len(drafts), first_seed=first_seed)
    logits = torch.tensor(p).clamp(min=1e-30).log().repeat(len(drafts), 1)
    probs = torch.tensor(q).repeat(len(drafts), 1)
    return verified(part, info, logits, drafts, probs).sampled_token_ids


def same_runs(got: Sequence[list[int]], expected: Sequence[list[int]], *, on: str, hint: str) -> None:
    """Compare the tokens of many requests, and show those of the first three that differ."""
    runs = dict(enumerate(got))
    differ = [number for number, run in enumerate(expected) if runs.get(number) != run]
    first = differ[:3]
    shown = f"the tokens of the first {len(first)} of {len(differ)} requests that differ"
    wanted = {number: expected[number] for number in first}
    same({number: runs.get(number) for number in first}, wanted, on=f"{on}; {shown}", hint=hint)


def from_q(q: Sequence[float], number: int) -> list[list[int]]:
    """One draft for each of many requests, in the shares of `q`."""
    counts = [round(share * number) for share in q]
    drafts = [[token_id] for token_id, count in enumerate(counts) for _ in range(count)]
    Random(5).shuffle(drafts)
    return drafts


def same_shares(tokens: Sequence[Any], expected: Mapping[Any, float], *, on: str, hint: str) -> None:
    """Raise `Broken` unless the tokens have this distribution, as well as so many draws can show it."""
    counts, number = Counter(tokens), len(tokens)
    likely = {token: share for token, share in expected.items() if share > 0}
    shares = {token: round(counts[token] / number, 3) for token in sorted(counts | dict(expected))}
    squares = sum((counts[token] - number * share) ** 2 / (number * share) for token, share in likely.items())
    freedom = len(likely) - 1
    if squares > freedom + 6 * (2 * freedom) ** 0.5 or counts.keys() - likely.keys():
        raise Broken(f"{on}: shares of {number:,} draws", expected, shares, hint)


# --- certain drafts ---------------------------------------------------------------------------------------------------


def test_right_drafts_are_accepted(part: Any) -> None:
    """All drafts that are right are accepted, and the target's token behind the last one follows."""
    hint = "All rows count if all drafts are right: one token more than there are drafts."
    same_greedy(part, [2], [2, 3], [2, 3], hint)
    same_greedy(part, [2, 3, 0], [2, 3, 0, 1], [2, 3, 0, 1], hint)


def test_a_wrong_draft_is_corrected(part: Any) -> None:
    """The first wrong draft is replaced by the target's token, and nothing behind it counts."""
    hint = "sampled[i] is what drafts[i] should have been. The target's token stands in place of the first wrong draft."
    same_greedy(part, [1], [2, 3], [2], hint)
    same_greedy(part, [2, 3, 3], [2, 3, 0, 1], [2, 3, 0], hint)
    hint = "What is right again behind a wrong draft was computed on another text: stop at the first wrong one."
    same_greedy(part, [2, 1, 0], [2, 3, 0, 0], [2, 3], hint)
    same_greedy(part, [1, 3, 0], [2, 3, 0, 1], [2], hint)


def test_each_request_has_its_own_rows(part: Any) -> None:
    """Requests with and without drafts share a step; a piece of a prompt, which has no row, gets no token."""
    drafts: list[list[int]] = [[], [1, 2], [], [0], []]
    best: list[list[int]] = [[], [1, 3, 0], [2], [0, 0], []]
    hint = "The rows of a request begin behind those of the requests before it."
    on = f"drafts {drafts}; the target's tokens in the rows {best}"
    same(greedy(part, drafts, best), {"r1": [1, 3], "r2": [2], "r3": [0, 0]}, on=on, hint=hint)


def test_only_rows_that_count_may_fail(part: Any) -> None:
    """Logits that are not finite end a request with an error, unless they stand behind a wrong draft."""
    logits = torch.eye(VOCAB)[[2, 3, 0, 2, 3, 0]]
    logits[[2, 5]] = float("nan")
    output = verified(part, info_of(row_of(), row_of()), logits, [[2, 1], [2, 3]])
    got = (dict(zip(output.req_ids, output.sampled_token_ids, strict=True)), list(output.errors))
    on = "drafts [[2, 1], [2, 3]]; the target's tokens [[2, 3, NaN], [2, 3, NaN]]: tokens, and requests with an error"
    hint = "A row behind a wrong draft may hold anything; only a row that counts is an error."
    same(got, ({"r0": [2, 3]}, ["r1"]), on=on, hint=hint)


def test_certain_drafts_change_no_draw(part: Any) -> None:
    """Looked up drafts of a request that draws are compared with the token that it would have drawn without them."""
    info, logits = copies_of(row_of(temperature=1.0), 200), torch.tensor([P, NEXT]).log().repeat(200, 1)
    alone = Sampler()(logits, metadata_of_rows(info, [2] * 200, [[0]] * 200)).token_ids
    pairs = list(zip(alone[::2], alone[1::2], strict=True))
    drafts = [[number % VOCAB] for number in range(200)]
    expected = [[one, two] if one == guess else [one] for (one, two), (guess,) in zip(pairs, drafts, strict=True)]
    hint = "Certain drafts have no probabilities: draw the target's token as always, and compare."
    got = verified(part, info, logits, drafts).sampled_token_ids
    wrong = next((number for number in range(200) if got[number] != expected[number]), 0)
    on = f"without drafts it draws {list(pairs[wrong])}; the draft is {drafts[wrong]}, seed {wrong}"
    same(got[wrong], expected[wrong], on=on, hint=hint)


# --- drawn drafts -----------------------------------------------------------------------------------------------------


def test_likely_drafts_are_kept(part: Any) -> None:
    """A drawn draft to which the target gives no less probability than the draft model is always accepted."""
    for draft in (0, 1):
        runs = drawn(part, [[draft]] * 300, [P, NEXT], [Q])
        on = f"draft {draft}, p={P}, q={Q}, 300 seeds: first tokens, and tokens in all"
        hint = "min(1, p(x) / q(x)) is 1 here. An accepted draft is followed by a token of the next row."
        got = (sorted({run[0] for run in runs}), {len(run) for run in runs})
        same(got, ([draft], {2}), on=on, hint=hint)


def test_a_replacement_has_a_surplus(part: Any) -> None:
    """A rejected draft is replaced by a token that the draft model underrates, and nothing follows it."""
    runs = drawn(part, [[2]] * 500, [P, NEXT], [Q])
    on = f"draft 2, p={P}, q={Q}, 500 seeds: all first tokens"
    hint = "It is drawn from max(p - q, 0): only tokens 0 and 1 have more probability in p than in q."
    same(sorted({run[0] for run in runs}), [0, 1, 2], on=on, hint=hint)
    hint = "A replaced draft was wrong: the row behind it does not count."
    ends = {(run[0] == 2, len(run)) for run in runs}
    same(ends, {(True, 2), (False, 1)}, on=f"{on}: (is it the draft, number of tokens)", hint=hint)
    impossible = [0.5, 0.5, 0.0, 0.0]
    runs = drawn(part, [[2]] * 500, [impossible, NEXT], [Q])
    on = f"draft 2, p={impossible}, q={Q}, 500 seeds: all runs"
    hint = "A draft that the target never says is always rejected."
    same(sorted({tuple(run) for run in runs}), [(0,), (1,)], on=on, hint=hint)


def test_drafts_are_accepted_as_often_as_possible(part: Any) -> None:
    """A drawn draft is accepted with probability min(1, p / q): in all the sum of min(p, q) over the tokens."""
    hint = "Accept if a number is below p(x) / q(x): not below p(x), and not if a draw of the target is the same token."
    runs = drawn(part, [[2]] * MANY, [P, NEXT], [Q])
    on = f"draft 2, p={P}, q={Q}; accepted or not"
    same_shares([run[0] == 2 for run in runs], {True: 1 / 3, False: 2 / 3}, on=on, hint=hint)
    drafts = from_q(Q, MANY)
    runs = drawn(part, drafts, [P, NEXT], [Q])
    kept = [run[0] == draft for run, (draft,) in zip(runs, drafts, strict=True)]
    on = f"drafts drawn from q={Q}, p={P}; accepted or not"
    same_shares(kept, {True: 0.6, False: 0.4}, on=on, hint=hint)


def test_the_distribution_is_that_of_the_target(part: Any) -> None:
    """Drafts of any draft model leave the target's distribution as it is."""
    hint = "Draw the replacement from max(p - q, 0), with a second number: the first one is large if it rejects."
    for p, q in ((P, Q), (NEXT, [0.25] * 4), ([0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7])):
        runs = drawn(part, from_q(q, MANY), [p, NEXT], [q])
        expected = dict(enumerate(p))
        same_shares([run[0] for run in runs], expected, on=f"drafts drawn from q={q}, p={p}", hint=hint)


def test_the_next_draft_is_a_draw_of_its_own(part: Any) -> None:
    """The second draft of a request is decided by its own rows and its own random numbers."""
    even = [0.25] * VOCAB
    runs = drawn(part, [[2, *second] for second in from_q(even, MANY)], [P, NEXT, P], [Q, even])
    on = f"first drafts 2, q={Q}, p={P}; if accepted, second drafts from q={even}, p={NEXT}; behind both p={P}: "
    hint = "Each draft has its position: with the same numbers for both, the second one depends on the first."
    behind = [run[1] for run in runs if run[0] == 2]
    same_shares(behind, dict(enumerate(NEXT)), on=f"{on}second tokens", hint=hint)
    behind = [run[2] for run in runs if len(run) == 3]
    same_shares(behind, dict(enumerate(P)), on=f"{on}third tokens", hint=hint)


def test_other_requests_change_nothing(part: Any) -> None:
    """The tokens of a request depend on its seed and position, not on the other requests of the step or on the run."""
    drafts = from_q(Q, 40)
    together = drawn(part, drafts, [P, NEXT], [Q])
    hint = "Use draws(seeds, positions, stream): a generator's numbers depend on the draws before."
    same_runs(drawn(part, drafts, [P, NEXT], [Q]), together, on="40 requests, twice the same step", hint=hint)
    for number in (0, 17, 39):
        alone = drawn(part, drafts[number : number + 1], [P, NEXT], [Q], first_seed=number)
        same(alone, together[number : number + 1], on=f"request {number} of 40 with drafts, alone in a step", hint=hint)
    mixed = verified(
        part,
        info_of(row_of(), row_of(3, temperature=1.0), row_of()),
        torch.tensor([P, NEXT] * 3).log(),
        [[1], drafts[3], [0]],
        torch.tensor([Q] * 3),
    ).sampled_token_ids
    on = f"greedy requests with drafts 1 and 0, and request 3 with seed 3 and draft {drafts[3][0]} between them"
    same(mixed, [[0], together[3], [0, 3]], on=on, hint="Of the greedy requests nothing is drawn.")


def test_equal_distributions_are_no_trouble(part: Any) -> None:
    """Where p and q are equal except for rounding, the tokens are tokens of the vocabulary."""
    info, logits = copies_of(row_of(temperature=1.0), 1, first_seed=NEAR_ONE), torch.tensor([P, NEXT]).log()
    p = distribution(logits, metadata_of_rows(info, [2], [[0]]))[:1]
    assert stream_draws([NEAR_ONE], [0], ACCEPT_STREAM)[0] > 1 - 1e-7
    ((first, *_),) = verified(part, info, logits, [[2]], p * (1 + 1e-6)).sampled_token_ids
    on = "q = p * (1 + 1e-6) for all tokens, and a number so near to 1 that the draft is rejected; is it a token?"
    hint = "No token has a surplus then, and a draw from zeros gives no token: draw from p."
    same(first in range(VOCAB), True, on=on, hint=hint)


# --- many requests ----------------------------------------------------------------------------------------------------


def test_it_is_right_for_many_batches(part: Any) -> None:
    """For any batch of greedy requests the tokens are those that a loop over the drafts accepts."""
    rng = Random(1)
    for _ in range(60):
        drafts, best, expected = list[list[int]](), list[list[int]](), dict[str, list[int]]()
        for number in range(rng.randint(1, 6)):
            own = [rng.randrange(2) for _ in range(rng.randint(0, 4))]
            rows = [rng.randrange(2) for _ in range(len(own) + 1)]
            if not own and rng.random() < 0.5:
                rows = []
            drafts.append(own)
            best.append(rows)
            right = next((place for place, draft in enumerate(own) if draft != rows[place]), len(own))
            if rows:
                expected[f"r{number}"] = rows[: right + 1]
        if not any(drafts):
            continue
        on = f"drafts {drafts}; the target's tokens in the rows {best}"
        same(greedy(part, drafts, best), expected, on=on)
