"""How far a prompt may go in a step before its pictures cost too much."""

from typing import Any

import pytest
import torch

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder_budget import EncoderBudget
from tests.m6_multimodal_pd.items import item, req

ROW = torch.zeros(1, 4)


@pytest.fixture
def cache() -> EmbeddingCache:
    return EmbeddingCache(capacity_bytes=100 * ROW.nbytes, tracer=Tracer())


def budget(cache: EmbeddingCache, max_tokens: int) -> EncoderBudget:
    return EncoderBudget(max_tokens=max_tokens, bytes_per_token=ROW.nbytes, cache=cache)


def cached(cache: EmbeddingCache, *items: Any) -> None:
    for own in items:
        assert cache.put(own.hash, ROW.expand(own.num_tokens, -1).contiguous(), in_use=())


A, B, C = item("a", (5, 15)), item("b", (20, 30)), item("c", (40, 50))


TWICE = item("a", (20, 30))


@pytest.mark.parametrize(
    ("max_tokens", "items", "start", "num_tokens", "most"),
    [
        (1, (), 0, 60, 60),
        (30, (A, B, C), 0, 60, 60),
        (25, (A, B, C), 0, 60, 40),
        (20, (A, B, C), 0, 60, 40),
        (19, (A, B, C), 0, 60, 20),
        (10, (A, B, C), 16, 44, 24),
        (15, (A, B), 0, 25, 20),
        (10, (A, TWICE), 0, 60, 60),
    ],
    ids="text all too-much exactly one-less later-piece ends-inside twice".split(),
)
def test_a_piece_ends_in_front_of_the_first_picture_that_is_too_much(
    cache: EmbeddingCache, max_tokens: int, items: tuple[Any, ...], start: int, num_tokens: int, most: int
) -> None:
    """A picture is paid for whole, though the piece ends inside it, and once. To ask takes nothing."""
    step = budget(cache, max_tokens)
    for _ in range(2):
        assert step.most(req(60, *items), start, num_tokens) == most


def test_what_is_encoded_already_costs_nothing(cache):
    cached(cache, A, B)
    assert budget(cache, 10).most(req(60, A, B, C), 0, 60) == 60


def test_a_picture_that_is_larger_than_the_budget_may_run_if_it_is_the_only_one_encoded(cache):
    assert budget(cache, 3).most(req(60, A, B), 0, 60) == 20
    cached(cache, A)
    assert budget(cache, 3).most(req(60, A, B, C), 0, 60) == 40


def test_requests_of_a_step_share_its_budget(cache):
    step = budget(cache, 20)
    step.take(req(30, A), 0, 30)
    other = item("d", (0, 10))
    assert step.most(req(40, B), 0, 40) == 40
    step.take(req(40, B), 0, 40)
    assert step.most(req(20, other), 0, 20) == 0
    assert step.most(req(50, item("a", (3, 13))), 0, 50) == 50, "somebody else pays for it"


def test_a_piece_that_begins_inside_a_picture_may_go_on_if_its_embeddings_are_there(cache):
    cached(cache, A)
    assert budget(cache, 10).most(req(60, A, B, C), 9, 51) == 31


def test_a_step_holds_no_more_than_the_cache_has_room_for():
    small = EmbeddingCache(capacity_bytes=15 * ROW.nbytes, tracer=Tracer())
    assert budget(small, 100).most(req(60, A, B), 0, 60) == 20
    cached(small, A)
    assert budget(small, 100).most(req(60, A, B), 0, 60) == 20, "what is found must be held, too"
    assert budget(small, 100).most(req(60, B, C), 0, 60) == 40
