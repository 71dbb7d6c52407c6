"""The rows behind guesses are what m1 would make of them if the guesses had really been said.

And what stands in a row that counts is reported of it: log-probabilities, or the error that ends its request. A row
behind a wrong guess is nobody's.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from m1_single_request.errors import ForwardError
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler, adjusted
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.speculative.rejection_sampler import distribution
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m5_chunked_prefill_spec.speculative.verify_rows import metadata_of_rows
from tests.m5_chunked_prefill_spec.guesses import CPU, info_of, m1_rows, make_sampler, row_of
from tests.support.engines import Recorder

VOCAB = 7
STOPS = (2, 5)
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "logprobs": 0},
    {"min_tokens": 2},
    {"min_tokens": 1, "logit_bias": {2: 4.0, 3: -100.0}},
    {"logit_bias": {0: 1.5}, "temperature": 0.5},
    {"repetition_penalty": 1.4},
    {"temperature": 0.9, "frequency_penalty": -0.7, "min_tokens": 4, "logit_bias": {5: 1.0}},
    {"presence_penalty": 1.2, "min_tokens": 3},
]
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), tokens, tokens),
        min_size=1,
        max_size=4,
    ),
    st.sets(st.integers(0, 3)),
)
def test_the_rows_behind_guesses_are_those_of_m1_if_they_had_been_said(
    asked: list[tuple[dict[str, Any], list[int], list[int], list[int]]], idle: set[int]
) -> None:
    """`idle`: requests of which nothing is sampled in this step."""
    reqs = [row_of(i, prompt=prompt, output=output, **kind) for i, (kind, prompt, output, _) in enumerate(asked)]
    guesses = [[] if i in idle else own for i, (*_, own) in enumerate(asked)]
    counts = [0 if i in idle else 1 + len(own) for i, own in enumerate(guesses)]
    expected_rows = [
        row
        for req, own, count in zip(reqs, guesses, counts, strict=True)
        for row in m1_rows(req, [own[:i] for i in range(count)], STOPS)
    ]
    found = metadata_of_rows(info_of(*reqs, vocab_size=VOCAB, stop_ids=STOPS), counts, guesses)
    assert len(found.greedy) == len(expected_rows)
    if expected_rows:
        check_same(found, SamplingMetadata.from_rows(expected_rows, vocab_size=VOCAB, device=CPU))


def check_same(found: SamplingMetadata, expected: SamplingMetadata) -> None:
    """Whatever the logits are, both choose the same, from the same distribution."""
    assert found.num_logprobs == expected.num_logprobs and found.greedy.tolist() == expected.greedy.tolist()
    logits = 3 * torch.randn(len(expected.greedy), VOCAB, generator=torch.Generator().manual_seed(1))
    assert torch.equal(adjusted(logits, found), adjusted(logits, expected))
    assert torch.equal(distribution(logits, found), distribution(logits, expected))
    assert Sampler()(logits, found) == Sampler()(logits, expected)


def test_verifying_changes_nothing_of_the_batch_itself() -> None:
    """Guesses may be wrong: only what is accepted is counted, by `advance`."""
    reqs = [row_of(i, output=[1], **KINDS[8]) for i in range(2)]
    info, untouched = (info_of(*reqs, vocab_size=VOCAB, stop_ids=STOPS) for _ in range(2))
    metadata_of_rows(info, [4, 2], [[3, 3, 6], [4]])
    assert info.positions.tolist() == [1, 1]
    for ours, theirs in ((info.bias, untouched.bias), (info.seen, untouched.seen)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    assert info.output_counts is not None and info.output_counts.sum() == 2


# --- one row of the real thing ----------------------------------------------------------------------------------------

BEST = [3, 1, 4, 6]  # the best token of each row


def verify(
    req: Request,
    guesses: Sequence[int],
    *,
    spoil: dict[int, float] | None = None,
    probs: torch.Tensor | None = None,
    others: Sequence[Request] = (),
    stop_ids: Sequence[int] = (),
    tracer: Tracer | None = None,
) -> ModelRunnerOutput:
    """The verification of one request with three guesses, and of `others` with one right one; `spoil`: rows whose
    logits hold such a number."""
    logits = torch.cat([LOGITS, *(LOGITS[:2] for _ in others)]).clone()
    for row, value in (spoil or {}).items():
        logits[row, 2] = value
    drafts = Drafts([list(guesses), *([BEST[0]] for _ in others)], probs)
    info = info_of(req, *others, vocab_size=VOCAB, stop_ids=stop_ids)
    ids = [str(i) for i in range(1 + len(others))]
    return make_sampler(tracer)(ids, info, logits, [4, *(2 for _ in others)], drafts)


LOGITS = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) + 9 * torch.eye(VOCAB)[BEST]


@pytest.mark.parametrize(("value", "temperature"), [(float("nan"), 0.0), (float("-inf"), 0.1)])
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize(("guesses", "num_looked_at"), [([3, 1, 4], 4), ([3, 1, 0], 3), ([0, 1, 4], 1)])
def test_a_broken_row_ends_its_own_request_if_it_counts_and_nobody_otherwise(
    value: float, temperature: float, row: int, guesses: list[int], num_looked_at: int
) -> None:
    req, other = row_of(1, temperature=temperature), row_of(2, temperature=temperature)
    sampled = verify(req, guesses, spoil={row: value}, others=[other])
    assert sampled.sampled_token_ids[-1] == BEST[:2], "the other one is well"
    if row < num_looked_at:
        assert sampled.req_ids == ["1"] and list(sampled.errors) == ["0"]
        assert isinstance(sampled.errors["0"], ForwardError) and "NaN or infinite" in str(sampled.errors["0"])
    else:
        assert sampled.req_ids == ["0", "1"] and not sampled.errors
        assert sampled.sampled_token_ids[0] == BEST[:num_looked_at]


ONE_HOT = torch.eye(VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_settings_that_forbid_every_token_end_their_request_if_the_row_counts(
    temperature: float, is_drawn: bool, logprobs: int | None
) -> None:
    """Nothing is left before `min_tokens`, where every token would be the end: the row behind the second guess is."""
    req = row_of(1, temperature=temperature, logprobs=logprobs, min_tokens=2)
    other = row_of(2, temperature=temperature, logprobs=logprobs)
    drawn_from = ONE_HOT[[3, 1, 4, BEST[0]]] if is_drawn else None
    sampled = verify(req, [3, 1, 4], probs=drawn_from, others=[other], stop_ids=range(VOCAB))
    assert list(sampled.errors) == ["0"] and "leave every token at probability zero" in str(sampled.errors["0"])
    assert sampled.req_ids == ["1"] and sampled.sampled_token_ids == [BEST[:2]]


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("guesses", [[3, 1, 4], [3, 1, 0], [0, 1, 4]])
def test_log_probabilities_are_those_of_the_untouched_logits_whoever_chose_the_token(
    num_logprobs: int, temperature: float, is_drawn: bool, guesses: list[int]
) -> None:
    """Of guesses that are kept, of what stands in the place of a wrong one, and of the token behind the last one."""
    req = row_of(3, temperature=temperature, logprobs=num_logprobs, logit_bias={3: -2.0}, repetition_penalty=1.5)
    others = [row_of(4, temperature=temperature), row_of(5, logprobs=1)]
    drawn_from = ONE_HOT[[*guesses, BEST[0], BEST[0]]] if is_drawn else None
    sampled = verify(req, guesses, probs=drawn_from, others=others)
    assert sampled.logprobs[1] == [None] * len(sampled.sampled_token_ids[1]), "it did not ask"
    assert [len(row.token_ids) for row in sampled.logprobs[2] if row is not None] == [2] * len(
        sampled.sampled_token_ids[2]
    )
    raw = LOGITS.log_softmax(-1)
    for offset, (token_id, row) in enumerate(zip(sampled.sampled_token_ids[0], sampled.logprobs[0], strict=True)):
        assert row is not None
        best, best_ids = raw[offset].topk(num_logprobs)
        assert row.token_ids == (token_id, *best_ids.tolist())
        assert row.logprobs == pytest.approx((float(raw[offset, token_id]), *best.tolist()), abs=1e-6)
        rank = 1 + int((raw[offset] > raw[offset, token_id]).sum())
        assert row.ranks == (rank, *range(1, num_logprobs + 1))


def test_log_probabilities_go_with_the_token_that_stands_there_not_with_the_targets_own_draw() -> None:
    """Where all tokens are likely, a drawn guess that is kept, or what replaces it, is seldom that draw."""
    flat = torch.randn(4 * 50, VOCAB, generator=torch.Generator().manual_seed(4)) / 2
    info = info_of(*(row_of(seed, temperature=1.0, logprobs=2) for seed in range(50)), vocab_size=VOCAB)
    guesses = [[seed % VOCAB, (seed + 3) % VOCAB, 5] for seed in range(50)]
    drafts = Drafts(guesses, torch.full((150, VOCAB), 1 / VOCAB))
    sampled = make_sampler()([str(i) for i in range(50)], info, flat, [4] * 50, drafts)
    own = Sampler()(flat, metadata_of_rows(info, [4] * 50, guesses)).token_ids
    raw, others = flat.log_softmax(-1), 0
    for i, (run, rows) in enumerate(zip(sampled.sampled_token_ids, sampled.logprobs, strict=True)):
        for place, (token_id, row) in enumerate(zip(run, rows, strict=True), start=4 * i):
            assert row is not None and len(row.token_ids) == 3
            assert (row.token_ids[0], row.logprobs[0]) == (
                token_id,
                pytest.approx(float(raw[place, token_id]), abs=1e-6),
            )
            others += token_id != own[place]
    assert others > 50, "what stands there is another token than the target's own draw"


def test_the_trace_hears_of_the_tokens_that_a_request_gets_and_of_no_other() -> None:
    tracer = Tracer()
    recorder = Recorder(tracer)
    verify(row_of(1, output=[0, 0]), [3, 1, 0], tracer=tracer)
    events = recorder.events("sampled")
    assert [(event.position, event.token_id) for event in events] == [(2, 3), (3, 1), (4, 4)]
