"""Contract of m8's shares: which rank encodes which pictures of a step, so that all find the same."""

from random import Random
from typing import Any

from m8_parallel.models.shared_tower import shared_out
from tests.contracts.part import Broken, Part, same

PART = Part(
    name="image_shares",
    target="m8_parallel.models.shared_tower:shared_out",
    lesson="docs/m8_parallel.md#sharedtower-each-rank-encodes-some-of-the-pictures",
    starter="my_shares",
)


def loads(sizes: list[int], shares: Any) -> list[int]:
    """The patches of each rank."""
    return [sum(sizes[index] for index in share) for share in shares]


def called(part: Any, sizes: list[int], num_ranks: int) -> tuple[str, Any]:
    """A call as a learner would write it, and its result."""
    on = f"my_shares({sizes}, {num_ranks})"
    given = list(sizes)
    found = part(given, num_ranks)
    same(given, sizes, on=f"{on}, and the list that was given", hint="Do not change the list of the caller.")
    return on, found


def test_there_is_a_list_for_each_rank(part: Any) -> None:
    """The result has a list for each rank, also for those without pictures."""
    for sizes, num_ranks in (([3], 4), ([], 3), ([1, 2], 2)):
        on, found = called(part, sizes, num_ranks)
        if not isinstance(found, list) or not all(isinstance(share, list) for share in found):
            raise Broken(on, "a list of lists", found)
        hint = "A rank without pictures takes part in the collective all the same, so it has an empty list."
        same(len(found), num_ranks, on=on, hint=hint)


def test_every_picture_has_one_rank(part: Any) -> None:
    """Every picture is in one list, by its index."""
    for sizes, num_ranks in (([5, 5, 5], 2), ([7, 1, 9, 4], 3), ([2] * 9, 4)):
        on, found = called(part, sizes, num_ranks)
        indices = sorted(index for share in found for index in share)
        same(indices, list(range(len(sizes))), on=on, hint="The lists have indices of `sizes`, each once.")


def test_the_largest_goes_first_to_the_rank_with_least(part: Any) -> None:
    """The largest picture goes first, each to the rank that has fewest patches so far."""
    for sizes, num_ranks in (([1, 1, 1, 9], 2), ([8, 7, 6, 5, 4], 2), ([9, 1, 1, 1, 1, 1], 3)):
        on, found = called(part, sizes, num_ranks)
        expected = sorted(loads(sizes, shared_out(sizes, num_ranks)))
        hint = "Count patches, not pictures, and begin with the largest picture."
        same(sorted(loads(sizes, found)), expected, on=f"the patches of the ranks after {on}", hint=hint)


def test_ties_are_decided_alike_on_all_ranks(part: Any) -> None:
    """Of equal pictures the earlier one goes first, of equal ranks the first gets it."""
    for sizes, num_ranks in (([4, 4], 2), ([3, 3, 3], 2), ([2, 5, 2, 5], 3)):
        on, found = called(part, sizes, num_ranks)
        hint = "Each rank calls this for itself, and all must find the same: also which of two equal ones comes first."
        same(
            [sorted(share) for share in found],
            [sorted(each) for each in shared_out(sizes, num_ranks)],
            on=on,
            hint=hint,
        )


def test_pictures_are_encoded_in_the_order_of_their_sharing(part: Any) -> None:
    """The pictures of a rank are in the order in which they were given to it."""
    for sizes, num_ranks in (([1, 5, 3], 1), ([1, 2, 3, 4, 5, 6], 2)):
        on, found = called(part, sizes, num_ranks)
        hint = "Append each picture when the rank gets it: the largest comes first."
        same(found, shared_out(sizes, num_ranks), on=on, hint=hint)


def test_it_is_right_for_any_batch(part: Any) -> None:
    """For random pictures and up to eight ranks the shares are those of the rule."""
    rng = Random(0)
    for _ in range(200):
        sizes, num_ranks = [rng.randrange(1, 30) for _ in range(rng.randrange(12))], rng.randrange(1, 9)
        on, found = called(part, sizes, num_ranks)
        same(found, shared_out(sizes, num_ranks), on=on, hint="The rule alone decides: nothing random, no set.")
