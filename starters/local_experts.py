"""Build the local experts of m8: the experts of one rank.

In a layer with experts each token uses a few of many small MLPs. With expert parallelism each rank has some of them
whole. All ranks have the hidden states of all tokens, and the router's choice for each of them. Each rank computes its
own experts, and returns zeros for the others. Then an all-reduce adds up the parts, as it does behind any other layer.
Three errors to avoid: an expert is computed twice, the second expert of a token overwrites the first, and experts run
for a token that has chosen none of this rank.

Explained in docs/m8_parallel.md#experts-cut-or-whole.

    cp starters/local_experts.py my_experts.py
    pytest --part local_experts=my_experts.py:MyLocalExperts
"""

from typing import Any

from torch import Tensor


class MyLocalExperts:
    """The experts of a rank, in the place of the experts of a layer.

    The attributes `gate_up` and `down` are those of `experts`: another part of the engine writes new weights there.
    """

    def __init__(self, experts: Any, first: int, count: int) -> None:
        """`experts`: computes the `count` experts of this rank, which it knows as 0 to `count` - 1. Called with hidden
        states `[num_pairs, width]`, experts and weights `[num_pairs, n]`, it returns the weighted sum of each row's
        experts, `[num_pairs, width]`. `first`: the number of its first expert among those of all ranks."""
        self.gate_up, self.down = experts.gate_up, experts.down
        raise NotImplementedError

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of the weighted sums, `[num_tokens, width]`, in the type of `hidden`.

        `hidden`: `[num_tokens, width]`. `experts`: the experts of each token among those of all ranks, int64, and
        `weights` the router's weight of each of them, both `[num_tokens, top_k]`. A token may have several experts
        here, or none. The arguments do not change.
        """
        raise NotImplementedError
