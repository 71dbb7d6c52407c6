"""Build the shares of m8: which rank encodes which pictures of a step.

The vision tower is whole on every rank, and a picture needs nothing of another one. So pictures are shared out. Each
rank computes the shares by itself, from the sizes of all images, and all must compute the same. Otherwise two ranks
encode the same image, and each assigns the rows of the all-gather to other images. The step lasts as long as the rank
with most patches, so the shares should be even.

Explained in docs/m8_parallel.md#sharedtower-each-rank-encodes-some-of-the-pictures.

    cp starters/image_shares.py my_shares.py
    pytest --part image_shares=my_shares.py:my_shares
"""

from collections.abc import Sequence


def my_shares(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the pictures of each rank: a list of indices of `sizes` for each of the `num_ranks` ranks.

    `sizes`: the patches of each picture. The largest picture is given out first, each to the rank that has the fewest
    patches so far. Of several such ranks the first gets it; of equally large pictures the earlier one is given out
    first. The pictures of a rank are in the order in which it got them. `sizes` does not change.
    """
    raise NotImplementedError
