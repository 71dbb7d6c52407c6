"""Typical mistakes in segmented LRU, each with the hint that it must get."""

from collections import Counter
from typing import Any


def lru(node: Any) -> Any:
    """One segment."""
    return node.last_access_time


def lfu(node: Any) -> Any:
    """As many segments as there are counts."""
    return (node.hit_count, node.last_access_time)


def one_hit(node: Any) -> Any:
    """Protected from the first hit on."""
    return (node.hit_count > 0, node.last_access_time)


def three_hits(node: Any) -> Any:
    """Protected one hit too late."""
    return (node.hit_count > 2, node.last_access_time)


def newest_first(node: Any) -> Any:
    """The larger rank goes first, it seems."""
    return (node.hit_count >= 2, -node.last_access_time)


def bonus(node: Any) -> Any:
    """A number for the segment is added to the time."""
    return node.last_access_time + (1_000_000 if node.hit_count >= 2 else 0)


def by_creation(node: Any) -> Any:
    """FIFO inside a segment."""
    return (node.hit_count >= 2, node.creation_time)


def decides_ties(node: Any) -> Any:
    """Inside the segment of the protected the hits break a tie."""
    return (node.hit_count >= 2, node.last_access_time, node.hit_count)


def spends_a_hit(node: Any) -> Any:
    """Whoever is protected pays for it."""
    rank = (node.hit_count >= 2, node.last_access_time)
    node.hit_count = min(node.hit_count, 2)
    return rank


ASKED: Counter[int] = Counter()


def counts_questions(node: Any) -> Any:
    """How often a rank was asked for is part of it."""
    ASKED[node.id] += 1
    return (node.hit_count >= 2, node.last_access_time, ASKED[node.id])


WRONG = [
    (one_hit, "Only from the second hit on"),
    (lru, "The segment comes before the time"),
    (lfu, "Otherwise old favourites stay for ever"),
    (three_hits, "From PROBATION_HITS hits on"),
    (newest_first, "the smaller last_access_time has the smaller rank"),
    (bonus, "No number added to a time is large enough"),
    (by_creation, "the smaller last_access_time has the smaller rank"),
    (decides_ties, "Inside a segment nothing but the time decides"),
    (spends_a_hit, "A strategy only reads"),
    (counts_questions, "nothing that is kept"),
]
