"""Who guesses: what followed the last tokens where they stood first, against a search that compares token by token."""

from collections.abc import Sequence

from hypothesis import example, given, strategies as st

from m4_radix_cache.mem_cache.radix_key import RadixKey
from m5_chunked_prefill_spec import SpeculativeConfig
from m5_chunked_prefill_spec.speculative.proposer import DraftModelProposer, NgramProposer, make_proposer
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN
from tests.m4_radix_cache.reqs import make_req


def brute_force(tokens: Sequence[int], shortest: int, longest: int, limit: int) -> list[int]:
    """What followed the longest run of last tokens that stood there before, at its earliest place."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return list(tokens[start + size : start + size + limit])
    return []


# Ids of which one is bytes of another, shifted: 0x01000000 holds 1 at its end.
LOOK_ALIKES = [0, 1, 256, 65536, 1 << 24, 257, 0x01010101 & 0x7FFFFFFF]
few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=40)
alike_ids = st.lists(st.sampled_from(LOOK_ALIKES), min_size=1, max_size=40)
many_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
repeated = st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 8)).map(lambda x: x[0] * x[1])


@given(
    tokens=few_ids | alike_ids | many_ids | repeated,
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    limit=st.integers(1, 9),
)
@example(tokens=[7], sizes=[1, 4], limit=3)
@example(tokens=[7, 7], sizes=[1, 4], limit=3)
@example(tokens=[7, 7], sizes=[2, 2], limit=3)
@example(tokens=[1, 2, 6, 5, 1, 2, 7, 5, 1, 2], sizes=[2, 4], limit=4)  # three tokens beat two, however late they stood
@example(
    tokens=[0x00010000, 0x00020000, 0, 8, 1, 2], sizes=[2, 4], limit=4
)  # the bytes of 1, 2 stand across two tokens
@example(tokens=[0x00010000, 0x00020000, 0, 8, 1, 2, 5, 1, 2], sizes=[2, 4], limit=4)
def test_it_finds_what_a_search_token_by_token_finds(tokens: list[int], sizes: list[int], limit: int) -> None:
    shortest, longest = sizes
    proposer = NgramProposer(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    assert proposer.lookup(RadixKey(tokens), limit) == brute_force(tokens, shortest, longest, limit)


def test_what_a_request_has_said_counts_as_its_prompt_does() -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=4)
    req = make_req(0, [1, 2, 3, 4], outputs=[9, 1])
    assert proposer.propose([req], [4]) == [[]]
    req.output_ids.append(2)
    assert proposer.propose([req], [4]) == [[3, 4, 9, 1]]
    req.output_ids.extend([3, 9, 1])
    assert proposer.propose([req], [4]) == [[2, 3, 9, 1]]


def test_each_request_has_its_own_limit_and_looks_up_only_itself() -> None:
    reqs = [make_req(i, [1, 2, 3, 4, 5, 1, 2]) for i in range(4)] + [make_req(4, [3, 4, 7, 1, 2])]
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=4)
    assert proposer.propose(reqs, [9, 2, 0, 1, 4]) == [[3, 4, 5, 1, 2], [3, 4], [], [3], []]


def test_the_namespace_of_a_request_changes_no_guess() -> None:
    tokens = [1, 2, 3, 1, 2]
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2)
    assert proposer.propose([make_req(0, tokens, extra_key="tenant")], [1]) == [[3]]


def test_the_draft_model_is_asked_for_as_many_as_may_be() -> None:
    reqs = [make_req(i, [1]) for i in range(3)]
    assert DraftModelProposer().propose(reqs, [2, 0, 3]) == [[UNKNOWN] * 2, [], [UNKNOWN] * 3]


def test_the_configuration_names_the_proposer() -> None:
    assert make_proposer(SpeculativeConfig()) is None
    assert isinstance(make_proposer(SpeculativeConfig(method="draft_model")), DraftModelProposer)
    ngram = make_proposer(SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3))
    assert isinstance(ngram, NgramProposer) and (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (1, 3)
