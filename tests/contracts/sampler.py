"""Contract of the sampler of m1: one token per row, from the settings and the random number of the row."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampling_metadata import SamplingRow
from tests.contracts.part import Part, same
from tests.m1_single_request.helpers import exact_distribution, metadata_of, row

PART = Part(
    name="sampler",
    target="m1_single_request.sampler:Sampler",
    lesson="docs/m1_single_request.md#sampler-logits-to-a-token",
    starter="MySampler",
    role="sampler",
    variant="m1_single_request",
)

TEN = [0.05 + number / 10 for number in range(10)]
"""Random numbers, evenly spread: of ten tokens that are drawn with them, as many as its probability are a token."""
ONE_TO_FOUR = (0.4, 0.3, 0.2, 0.1)
EDGE = 1e-5  # of a sum of probabilities, or of a limit: there rounding decides
LARGEST_UNIFORM = 1 - 2**-53


def chosen(part: Any, logits: Any, rows: Sequence[SamplingRow], uniforms: Sequence[float] | None = None) -> Any:
    """What the sampler says to `logits` `[rows, vocab]`; `uniforms`: the random numbers, instead of the rows' own."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    metadata = metadata_of(rows, logits.shape[-1])
    if uniforms is not None and metadata.uniforms is not None:
        metadata = replace(metadata, uniforms=torch.tensor(uniforms, dtype=torch.float64))
    return part()(logits, metadata)


def greedy(part: Any, logits: list[float], **settings: Any) -> list[int]:
    """The token that one greedy row gets."""
    return list(chosen(part, [logits], [row(**settings)]).token_ids)


def logits_of(probs: Sequence[float]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probs]


def expected_token(logits: Sequence[float], one: SamplingRow, uniform: float) -> int | None:
    """The token of a row, computed slowly in float64; None if the number is so near an edge that rounding decides."""
    history = (one.prompt_token_ids, one.output_token_ids, sorted(one.stop_ids))
    found: set[int | None] = set()
    for nudge in (-EDGE, 0.0, EDGE):
        top_p = one.params.top_p if one.params.top_p == 1 else min(1 - 1e-9, one.params.top_p * (1 + nudge))
        params = replace(one.params, min_p=min(1.0, one.params.min_p * (1 + nudge)), top_p=top_p)
        sums = np.cumsum(exact_distribution(logits, params, *history))
        found |= {int(np.searchsorted(sums, uniform + move, side="right")) for move in (-EDGE, EDGE)}
    return found.pop() if len(found) == 1 else None


def check_draws(part: Any, probs: Sequence[float], on: str, hint: str, **settings: Any) -> None:
    """Compare what ten rows with these settings and the ten numbers draw with what they must."""
    logits = logits_of(probs)
    one = row(**{"temperature": 1.0} | settings)
    tokens = [expected_token(logits, one, uniform) for uniform in TEN]
    clear = [place for place, token in enumerate(tokens) if token is not None]
    uniforms = [TEN[place] for place in clear]
    got = list(chosen(part, [logits] * len(clear), [one] * len(clear), uniforms).token_ids)
    shown = ", ".join(f"{uniform:.2f}" for uniform in uniforms)
    same(got, [tokens[place] for place in clear], on=f"{on}; the random numbers {shown}", hint=hint)


def test_a_greedy_row_gets_the_best_token(part: Any) -> None:
    """A greedy row gets the token with the largest logit."""
    rows = [row(), row()]
    got = list(chosen(part, [[1.0, 3.0, 2.0], [0.5, -1.0, 0.0]], rows).token_ids)
    same(got, [1, 0], on="logits [1, 3, 2] and [0.5, -1, 0], both greedy")


def test_of_equal_logits_the_lowest_id_wins(part: Any) -> None:
    """Of several best tokens a greedy row gets the one with the lowest id."""
    same(greedy(part, [0.0, 2.0, 2.0, 1.0, 2.0]), [1], on="logits [0, 2, 2, 1, 2]")


def test_a_bias_is_added_before_the_choice(part: Any) -> None:
    """A bias is added to the logits, also for a greedy row; minus infinity forbids a token."""
    hint = "Bias and penalties act on the logits before a greedy row chooses."
    same(greedy(part, [1.0, 3.0, 2.0], logit_bias={0: 5.0}), [0], on="logits [1, 3, 2], logit_bias={0: 5}", hint=hint)
    got = greedy(part, [1.0, 3.0, 2.0], min_tokens=1, stop_ids=[1])
    same(got, [2], on="logits [1, 3, 2]; token 1 is a stop id, and min_tokens is not reached", hint=hint)


def test_repetition_makes_a_seen_token_less_likely(part: Any) -> None:
    """The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output, once."""
    hint = "Dividing a negative logit by 2 makes it larger: the token would become more likely."
    got = greedy(part, [2.0, 1.2, 0.0], repetition_penalty=2.0, output=[0])
    same(got, [1], on="logits [2, 1.2, 0], repetition_penalty=2, the output is [0]", hint=hint)
    got = greedy(part, [-1.0, -1.5, -9.0], repetition_penalty=2.0, prompt=[0])
    same(got, [1], on="logits [-1, -1.5, -9], repetition_penalty=2, the prompt is [0]", hint=hint)
    got = greedy(part, [2.0, 0.9, 0.0], repetition_penalty=2.0, prompt=[0], output=[0, 0])
    hint = "It acts once, however often the token is there."
    same(got, [0], on="logits [2, 0.9, 0], repetition_penalty=2, the prompt is [0], the output [0, 0]", hint=hint)


def test_frequency_and_presence_count_the_output(part: Any) -> None:
    """Frequency is subtracted per occurrence in the output, presence once; the prompt does not count."""
    hint = "Only `output_counts` counts for these two: frequency times the count, presence if the count is not 0."
    got = greedy(part, [3.0, 2.5, 1.0], frequency_penalty=0.4, output=[0, 0], prompt=[1, 1, 1, 1])
    same(got, [1], on="logits [3, 2.5, 1], frequency_penalty=0.4, the output is [0, 0], the prompt [1] * 4", hint=hint)
    got = greedy(part, [3.0, 2.5, 1.0], presence_penalty=0.4, output=[0, 0])
    same(got, [0], on="logits [3, 2.5, 1], presence_penalty=0.4, the output is [0, 0]", hint=hint)
    got = greedy(part, [2.0, 0.7, 0.0], repetition_penalty=2.0, presence_penalty=0.5, output=[0])
    hint = "Repetition acts first: (2 / 2) - 0.5, not (2 - 0.5) / 2."
    on = "logits [2, 0.7, 0], repetition_penalty=2, presence_penalty=0.5, the output is [0]"
    same(got, [1], on=on, hint=hint)


def test_a_row_draws_with_its_number(part: Any) -> None:
    """A row that draws gets the token at which the running sum of the probabilities exceeds its random number."""
    hint = "The number is in metadata.uniforms: no other random number is needed. Add up in the order of token ids."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, temperature=1", hint)
    check_draws(part, (0.1, 0.2, 0.3, 0.4), "probabilities .1 .2 .3 .4, temperature=1", hint)


def test_temperature_divides_the_logits(part: Any) -> None:
    """A temperature below 1 makes the best token more likely, one above 1 makes all tokens alike."""
    hint = "Divide the logits by the temperature before the softmax."
    for temperature in (0.5, 4.0):
        on = f"probabilities .4 .3 .2 .1, temperature={temperature:g}"
        check_draws(part, ONE_TO_FOUR, on, hint, temperature=temperature)


def test_min_p_is_a_share_of_the_best(part: Any) -> None:
    """min_p removes the tokens that are less likely than this share of the best token."""
    hint = "The limit is min_p times the largest probability of the row."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, min_p=0.4", hint, min_p=0.4)
    hint = "A token that is as likely as the limit stays: at min_p=1 all of the best."
    check_draws(part, (0.3, 0.3, 0.1, 0.3), "probabilities .3 .3 .1 .3, min_p=1", hint, min_p=1.0)


def test_top_k_keeps_exactly_k(part: Any) -> None:
    """top_k keeps exactly the k most likely tokens; of equal ones those with the lower ids."""
    hint = "More than k tokens are as likely as the k-th: a limit on the probability keeps all of them."
    check_draws(part, (0.1, 0.2, 0.2, 0.3, 0.2), "probabilities .1 .2 .2 .3 .2, top_k=2", hint, top_k=2)
    check_draws(part, (0.1, 0.2, 0.2, 0.3, 0.2), "probabilities .1 .2 .2 .3 .2, top_k=3", hint, top_k=3)


def test_top_p_keeps_the_token_that_reaches_it(part: Any) -> None:
    """top_p keeps the fewest most likely tokens whose probabilities together reach it."""
    hint = "The token at which the sum reaches top_p belongs to the set: keep a token if the sum before it is less."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, top_p=0.6", hint, top_p=0.6)
    check_draws(part, (0.1, 0.2, 0.3, 0.4), "probabilities .1 .2 .3 .4, top_p=0.6", hint, top_p=0.6)
    hint = "The best token stays, even if it alone is more than top_p."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, top_p=0.1", hint, top_p=0.1)


def test_each_filter_acts_on_what_the_one_before_left(part: Any) -> None:
    """min_p acts first, then top_k, then top_p, whose shares are those of the tokens that are left."""
    hint = "Of .4 and .3, which top_k=2 leaves, the first has a share of .57: top_p=.5 keeps it alone."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, top_k=2, top_p=0.5", hint, top_k=2, top_p=0.5)
    hint = "Of .4 and .3, which min_p=.6 leaves, the first has a share of .57: top_p=.5 keeps it alone."
    check_draws(part, ONE_TO_FOUR, "probabilities .4 .3 .2 .1, min_p=0.6, top_p=0.5", hint, min_p=0.6, top_p=0.5)
    hint = "The temperature acts before the filters: it makes the four tokens more alike."
    on = "probabilities .4 .3 .2 .1, temperature=2, min_p=0.6"
    check_draws(part, ONE_TO_FOUR, on, hint, temperature=2.0, min_p=0.6)


def test_an_impossible_token_is_never_drawn(part: Any) -> None:
    """Not even the smallest and the largest random number draw a token of probability 0."""
    logits, uniforms = logits_of((0.0, 0.5, 0.0, 0.3, 0.2, 0.0)), [0.0, LARGEST_UNIFORM]
    got = list(chosen(part, [logits] * 2, [row(temperature=1.0)] * 2, uniforms).token_ids)
    hint = "The sum must exceed the number, not reach it: the sum before the first possible token is 0, too."
    same(got[0], 1, on="probabilities 0 .5 0 .3 .2 0, the random number 0", hint=hint)
    hint = "In float32 this number is 1, and no sum exceeds it. Compare in float64, with a share of the row's own sum."
    same(got[1], 4, on="probabilities 0 .5 0 .3 .2 0, the random number 1 - 2**-53", hint=hint)


def test_rows_do_not_concern_each_other(part: Any) -> None:
    """A row gets the same token beside rows with other settings, and the logits stay as they were."""
    rows = [
        row(),
        row(temperature=1.0),
        row(temperature=1.0, top_k=1),
        row(temperature=1.0, top_p=0.3),
        row(temperature=1.0, min_tokens=1, stop_ids=[0, 1, 2, 3]),
        row(temperature=0.5, logit_bias={3: 4.0}),
        row(repetition_penalty=2.0, output=[0]),
    ]
    logits: Tensor = torch.tensor([logits_of(ONE_TO_FOUR)] * len(rows))
    before = logits.clone()
    output = chosen(part, logits, rows, [0.95] * len(rows))
    names = "greedy, plain, top_k=1, top_p=0.3, nothing allowed, biased, penalised"
    on = f"probabilities .4 .3 .2 .1 in rows of these kinds: {names}; all with the number 0.95"
    same(output.impossible_rows, (4,), on=f"{on}; which rows get the id `vocab`?", hint="Only a bias can forbid all.")
    alone = [expected_token(logits[i].tolist(), rows[i], 0.95) for i in range(len(rows)) if i != 4]
    got = [token for i, token in enumerate(output.token_ids) if i != 4]
    hint = "A tensor is None if no row uses the setting. Else rows that do not use it have values that keep all tokens."
    same(got, alone, on=f"{on}, without the fifth", hint=hint)
    hint = "The logits are also used for log-probabilities. An operation in place (`+=`, `clamp_`) modifies them."
    same(logits, before, on=f"{on}; the logits afterwards", hint=hint)
    greedy_row = chosen(part, logits[:1], [row(min_tokens=1, stop_ids=[0, 1, 2, 3])])
    same(greedy_row.impossible_rows, (0,), on="a greedy row in which every token is forbidden")


def test_any_batch_gets_the_tokens_of_the_rules(part: Any) -> None:
    """With any settings, each row of a batch gets the token that a slow computation in float64 names."""
    rng = Random(1)
    for _ in range(40):
        vocab, rows, logits = rng.choice((5, 9)), list[SamplingRow](), list[list[float]]()
        for _ in range(4):
            settings: dict[str, Any] = {"temperature": rng.choice((0.0, 1.0, 2.0, 4.0))}
            choices = {
                "top_k": rng.randrange(1, vocab + 2),
                "top_p": rng.choice((0.2, 0.5, 0.8, 0.95)),
                "min_p": rng.choice((0.05, 0.3, 0.7)),
                "repetition_penalty": rng.choice((0.5, 2.0)),
                "frequency_penalty": rng.choice((-0.5, 0.75)),
                "presence_penalty": rng.choice((-0.5, 0.75)),
                "logit_bias": {rng.randrange(vocab): rng.choice((-3.0, 2.0))},
            }
            settings |= {name: value for name, value in choices.items() if rng.random() < 0.4}
            history = {name: [rng.randrange(vocab) for _ in range(3)] for name in ("prompt", "output")}
            rows.append(row(**settings, **history))
            logits.append([rng.randrange(-8, 9) / 4 for _ in range(vocab)])
        uniforms = [rng.random() for _ in rows]
        got = chosen(part, logits, rows, uniforms).token_ids
        for one, values, uniform, token in zip(rows, logits, uniforms, got, strict=True):
            wanted = expected_token(values, one, uniform)
            if wanted is not None:
                on = f"logits {values}, {one.params.describe() or 'greedy'}, prompt {one.prompt_token_ids}, "
                history = one.prompt_token_ids, one.output_token_ids, sorted(one.stop_ids)
                left = [round(float(prob), 3) for prob in exact_distribution(values, one.params, *history)]
                hint = f"After all settings the probabilities are {left}."
                on = f"{on}output {one.output_token_ids}, the random number {uniform:.4f}"
                same(token, wanted, on=on, hint=hint)
