"""Typical mistakes in shares, each with the hint that it must get."""

from collections.abc import Sequence

from m8_parallel.models.shared_tower import shared_out


def in_turns(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """One after the other, whatever their sizes."""
    return [list(range(rank, len(sizes), num_ranks)) for rank in range(num_ranks)]


def by_number(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Counts pictures, and not patches."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(parts, key=len).append(index)
    return parts


def without_empty_ones(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """A rank without pictures has no list."""
    return [part for part in shared_out(sizes, num_ranks) if part]


def the_last_of_equal_ranks(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Of equal ranks the last one gets it."""
    return shared_out(sizes, num_ranks)[::-1]


def in_the_order_of_the_prompt(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Each rank's pictures in the order of the prompt."""
    return [sorted(part) for part in shared_out(sizes, num_ranks)]


WRONG = [
    (in_turns, "begin with the largest picture"),
    (by_number, "Count patches, not pictures"),
    (without_empty_ones, "so it has an empty list"),
    (the_last_of_equal_ranks, "which of two equal ones comes first"),
    (in_the_order_of_the_prompt, "the largest comes first"),
]
