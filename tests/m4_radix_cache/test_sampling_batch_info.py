"""A batch's sampling parameters that live on say the same as those gathered anew.

The oracle is m1's `SamplingMetadata.from_rows` on the requests as they stand. It counts every token of the history
again, which is what the living batch is there to avoid.
"""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.tracer import Tracer
from m3_paged_attention.row_sampler import RowSampler, SamplingRow, SamplingRows, plain_metadata
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from tests.support.engines import Recorder
from tests.support.operations import operations

CPU = torch.device("cpu")
VOCAB = 7
EOS = frozenset({2, 5})
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1e-6, "top_k": 2, "top_p": 0.5, "min_p": 0.5},
    {"temperature": 0.5, "min_p": 0.1, "presence_penalty": 0.5},
    {"min_tokens": 2},
    {"temperature": 0.7, "min_tokens": 3, "ignore_eos": True},  # nothing can stop it, so nothing is forbidden
    {"min_tokens": 1, "logit_bias": {2: 4.0, 3: -100.0}},
    {"logit_bias": {0: 1.5}},
    {"repetition_penalty": 1.4},
    {"temperature": 0.9, "frequency_penalty": -0.7, "min_tokens": 4, "logit_bias": {5: 1.0}},
]


class Req:
    """As much of a request as the batch reads."""

    def __init__(self, seed: int = 0, prompt: Sequence[int] = (1, 1, 4), output: Sequence[int] = (), **settings: Any):
        self.sampling_params = SamplingParams(**settings)
        self.seed = seed
        self.sequence: Any = SimpleNamespace(
            prompt_token_ids=list(prompt), output_token_ids=list(output), sampling_params=self.sampling_params
        )

    @property
    def output(self) -> list[int]:
        return self.sequence.output_token_ids

    def sampling_row(self, stop_ids: frozenset[int]) -> SamplingRow:
        sequence = self.sequence
        output = list(sequence.output_token_ids)
        return SamplingRow(self.sampling_params, self.seed, sequence.prompt_token_ids, output, stop_ids)

    @property
    def row(self) -> SamplingRow:
        return self.sampling_row(stop_ids_of(self.sequence))


def stop_ids_of(sequence: Any) -> frozenset[int]:
    params = sequence.sampling_params
    return (frozenset() if params.ignore_eos else EOS).union(params.stop_token_ids)


def info_of(*reqs: Any, vocab_size: int = VOCAB) -> SamplingBatchInfo:
    return SamplingBatchInfo.from_reqs(reqs, vocab_size=vocab_size, stop_ids=stop_ids_of, device=CPU)


def accept(info: SamplingBatchInfo, reqs: Sequence[Req], token_ids: Sequence[int]) -> None:
    """Every request has one more token, and the batch is told."""
    for req, token_id in zip(reqs, token_ids, strict=True):
        req.output.append(token_id)
    info.advance(token_ids, 1)


def check(info: SamplingBatchInfo, reqs: Sequence[Req]) -> None:
    """The batch says of these requests what a look at each of them says."""
    rows = [req.row for req in reqs]
    assert len(info) == len(reqs)
    assert info.params == [row.params for row in rows]
    assert info.seeds == [row.seed for row in rows]
    assert info.positions.tolist() == [len(row.output_token_ids) for row in rows]
    assert info.is_plain == all(row.is_plain for row in rows)
    metadata = info.metadata()
    assert len(metadata.greedy) == len(rows)
    if rows:
        check_same(metadata, SamplingMetadata.from_rows(rows, vocab_size=VOCAB, device=CPU))


def check_same(found: SamplingMetadata, expected: SamplingMetadata) -> None:
    for field in dataclasses.fields(SamplingMetadata):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert same(ours, theirs), f"{field.name}: {ours}, not {theirs}"


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


# --- against the oracle -----------------------------------------------------------------------------------------------

number = st.integers(0, 2**20)
some_kinds = st.one_of(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    st.integers(1, 3).map(lambda n: [KINDS[0]] * n),  # batches of plain rows alone would be rare
)
a_verb = st.one_of(
    st.tuples(st.just("join"), some_kinds),
    *(
        st.tuples(st.just(verb), number)
        for verb in ("step", "step", "step", "keep", "retract", "resume", "look", "look")
    ),
)
scripts = st.tuples(some_kinds, st.lists(a_verb, min_size=3, max_size=20))


class World:
    """A running batch as a scheduler would keep it, and the requests that it threw out."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []
        self.retracted: list[Req] = []
        self.info = info_of()
        self.num_joined = 0

    def join(self, kinds: list[dict[str, Any]]) -> None:
        """New requests are prefilled, and join with what their first step needs."""
        for kind in kinds:
            self.num_joined += 1
            prompt = [(self.num_joined * 3 + i) % VOCAB for i in range(1 + self.num_joined % 4)]
            self.retracted.append(Req(seed=self.num_joined * 1000 - 2500, prompt=prompt, **kind))
        self.resume(len(kinds))

    def resume(self, amount: int) -> None:
        """The last ones that wait are prefilled; those that were retracted bring their output along."""
        split = len(self.retracted) - amount % (len(self.retracted) + 1)
        coming, self.retracted = self.retracted[split:], self.retracted[:split]
        self.info.merge_batch(info_of(*coming))
        self.reqs += coming

    def step(self, seed: int) -> None:
        accept(self.info, self.reqs, np.random.default_rng(seed).integers(VOCAB, size=len(self.reqs)).tolist())

    def keep(self, seed: int) -> None:
        """Any rows stay, in any order."""
        rng = np.random.default_rng(seed)
        keep = rng.permutation(len(self.reqs))[: rng.integers(1 + 2 * len(self.reqs))]
        self.info.filter_batch(keep if seed % 2 else keep.tolist())
        self.reqs = [self.reqs[i] for i in keep]

    def retract(self, pick: int) -> None:
        if self.reqs:
            out = pick % len(self.reqs)
            self.info.filter_batch([i for i in range(len(self.reqs)) if i != out])
            self.retracted.append(self.reqs.pop(out))

    def look(self, _: int) -> None:
        check(self.info, self.reqs)


@given(scripts)
def test_whatever_joins_leaves_and_returns_the_batch_says_what_its_requests_say(script: tuple[Any, list[Any]]) -> None:
    world = World()
    for verb, argument in [("join", script[0]), *script[1], ("look", 0), ("resume", 1), ("step", 1), ("look", 0)]:
        getattr(world, verb)(argument)


@pytest.mark.parametrize("ours", [[], [Req()]], ids=["into none", "into one"])
def test_a_merge_does_not_touch_the_batch_it_takes_from(ours: list[Req]) -> None:
    theirs = [Req(seed=i, **kind) for i, kind in enumerate(KINDS)]
    one, other = info_of(*ours), info_of(*theirs)
    one.merge_batch(other)
    together = ours + theirs
    accept(one, together, [3] * len(together))
    for req in theirs:
        req.output.clear()
    check(other, theirs)


# --- extremes ---------------------------------------------------------------------------------------------------------


def test_a_child_of_the_largest_seed_has_draws() -> None:
    """Child i of several outputs draws with seed + i, which may be more than 64 bits hold."""
    req = Req(seed=2**63 + 5, temperature=1.0)
    check(info_of(req), [req])


def test_as_many_min_tokens_as_can_be_asked_for() -> None:
    req = Req(min_tokens=2**63 - 1, max_tokens=2**63 - 1)
    info = info_of(req)
    accept(info, [req], [0])
    check(info, [req])


# --- what it costs, and what it is made of ----------------------------------------------------------------------------


def test_a_plain_batch_asks_nothing_of_torch() -> None:
    info, more = info_of(*[Req()] * 5), info_of(*[Req()] * 3)
    for size in (8, 7):
        plain_metadata(size, CPU)  # made once in a process
    with operations() as seen:
        info.merge_batch(more)
        for _ in range(3):
            info.metadata()
            info.advance([1] * 8, 1)
        info.filter_batch(range(7))
        info.metadata()
    assert not seen


def test_a_step_makes_no_tensor_again_that_has_not_changed() -> None:
    info = info_of(Req(temperature=0.7, top_p=0.8), Req(repetition_penalty=1.3))
    first = info.metadata()
    info.advance([3, 4], 1)
    second = info.metadata()
    assert second is not first
    for name in ("greedy", "temperature", "top_p", "penalties", "seen", "output_counts"):
        assert getattr(second, name) is getattr(first, name), name


# --- the sampler of m3 ------------------------------------------------------------------------------------------------


IMPOSSIBLE = len(KINDS)  # the row that forbids every token


@pytest.mark.parametrize("broken", [[], [3], [IMPOSSIBLE], range(len(KINDS) + 2)], ids=["no", "one", "that", "all"])
def test_the_row_sampler_does_with_it_what_it_does_with_rows(broken: Sequence[int]) -> None:
    reqs = [Req(seed=i, output=[i % VOCAB], **kind) for i, kind in enumerate(KINDS)]
    reqs += [Req(min_tokens=1, stop_token_ids=range(VOCAB)), Req()]
    names = [f"r{i}" for i in range(len(reqs))]
    logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(0))
    logits[-1, :2] = 3e38  # finite, though their sum is not
    logits[list(broken)] = torch.nan

    def sampled(batch: Any) -> tuple[list[str], list[list[int]], list[Any], dict[str, str], list[Any]]:
        tracer = Tracer()
        recorder = Recorder(tracer)
        result = RowSampler(sampler=Sampler(), token_text=str, tracer=tracer)(names, batch, logits, batch.metadata())
        assert all(type(error) is ForwardError for error in result.errors.values())
        errors = {name: str(error) for name, error in result.errors.items()}
        return result.req_ids, result.sampled_token_ids, result.logprobs, errors, recorder.events("sampled")

    info = info_of(*reqs)
    found = req_ids, token_ids, _, errors, events = sampled(info)
    assert found == sampled(SamplingRows([req.row for req in reqs], VOCAB, CPU))
    check(info, reqs)
    sound = [i for i in range(len(reqs)) if i not in broken and i != IMPOSSIBLE]
    assert req_ids == [names[i] for i in sound] == [event.rid for event in events]
    assert [event.position for event in events] == [len(reqs[i].output) for i in sound]
    alone = [Sampler()(logits[i : i + 1], info_of(reqs[i]).metadata()).token_ids[0] for i in sound]
    assert token_ids == [[token_id] for token_id in alone]
    failed = {names[i]: "infinite" if i in broken else "every token" for i in [*broken, IMPOSSIBLE]}
    assert list(errors) == list(failed) and all(word in errors[name] for name, word in failed.items())
