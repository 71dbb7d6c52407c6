"""Contract of m8's local experts: a rank computes its own experts alone, and the parts of all ranks add up."""

from typing import Any

import torch
from torch import Tensor

from tests.contracts.part import Broken, Part, close, same

PART = Part(
    name="local_experts",
    target="m8_parallel.models.parallel_decoder:LocalExperts",
    lesson="docs/m8_parallel.md#experts-cut-or-whole",
    starter="MyLocalExperts",
)

WIDTH, NUM_EXPERTS, TOP_K = 6, 8, 2


class Layer:
    """The experts of a rank: expert e of all multiplies by a matrix of its own. Notes what it is asked for."""

    gate_up = down = None

    def __init__(self, first: int, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrices = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator)[first : first + count]
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As a backend's experts: `[num_tokens, WIDTH]` with `[num_tokens, n]` experts and weights."""
        if experts.shape != weights.shape or len(experts) != len(hidden) or experts.dim() != 2:
            shapes = [list(each.shape) for each in (hidden, experts, weights)]
            raise Broken("experts(hidden, experts, weights)", "[t, width], [t, n], [t, n]", shapes)
        if len(experts) and not 0 <= int(experts.min()) <= int(experts.max()) < len(self.matrices):
            hint = "A rank's layer knows its own experts alone, as 0, 1, ...: subtract `first`."
            raise Broken(
                "experts(hidden, experts, weights)", f"experts below {len(self.matrices)}", experts.tolist(), hint
            )
        self.asked.append(tuple(experts.shape))
        outputs = torch.einsum("tw,tnvw->tnv", hidden, self.matrices[experts])
        return (outputs * weights[..., None]).sum(1)


def drawn(num_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and the experts and weights of a router: each token has different experts."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)
    return (
        torch.randn(num_tokens, WIDTH, generator=generator),
        order[:, :TOP_K],
        torch.rand(num_tokens, TOP_K, generator=generator),
    )


def parts_of(part: Any, inputs: tuple[Tensor, ...], size: int) -> list[Tensor]:
    """What each of `size` ranks returns."""
    count = NUM_EXPERTS // size
    return [part(Layer(rank * count, count), rank * count, count)(*inputs) for rank in range(size)]


def check_sum(part: Any, inputs: tuple[Tensor, ...], size: int, on: str) -> None:
    """The parts of all ranks add up to the layer."""
    hint = "Leave out the pairs of a token and another rank's expert, and no others; the weights stay as they are."
    expected = Layer(0, NUM_EXPERTS)(*inputs)
    close(torch.stack(parts_of(part, inputs, size)).sum(0), expected, on=on, tolerance=1e-4, hint=hint)


def test_one_rank_has_all(part: Any) -> None:
    """One rank with all experts computes the layer."""
    check_sum(part, drawn(5), 1, "5 tokens, one rank with all 8 experts")


def test_the_parts_of_all_ranks_add_up(part: Any) -> None:
    """The parts of several ranks add up to the layer."""
    for size in (2, 4, 8):
        check_sum(part, drawn(7), size, f"7 tokens, {size} ranks with {NUM_EXPERTS // size} experts each: their sum")


def test_a_token_whose_experts_are_all_here_has_their_sum(part: Any) -> None:
    """A token that has both its experts on one rank gets the sum of both there."""
    hidden = drawn(2)[0]
    inputs = hidden, torch.tensor([[1, 3], [0, 2]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    hint = "A token may be there twice: add to its row, do not overwrite it (`index_add_`)."
    own, other = parts_of(part, inputs, 2)
    close(
        own,
        Layer(0, NUM_EXPERTS)(*inputs),
        on="2 tokens with experts 1, 3 and 0, 2; rank 0 of 2",
        tolerance=1e-4,
        hint=hint,
    )
    close(other, torch.zeros_like(hidden), on="the same tokens on rank 1", tolerance=0, hint="It has nothing to add.")


def test_a_rank_without_a_token_computes_nothing(part: Any) -> None:
    """A rank that no token has chosen returns zeros of the same shape and type, and asks its experts for nothing."""
    hidden = drawn(3)[0].to(torch.bfloat16)
    layer = Layer(4, 4)
    layer.matrices = layer.matrices.to(torch.bfloat16)
    found = part(layer, 4, 4)(hidden, torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.ones(3, 2, dtype=torch.bfloat16))
    same(found, torch.zeros_like(hidden), on="3 tokens whose experts are all on another rank")
    computed = [shape for shape in layer.asked if shape[0]]
    same(computed, [], on="what its experts were asked for", hint="No token, no work: return zeros.")


def test_its_type_is_that_of_the_hidden_states(part: Any) -> None:
    """The result has the type of the hidden states, also where this rank computes something."""
    hidden, experts, weights = drawn(4)
    layer = Layer(0, 4)
    layer.matrices = layer.matrices.to(torch.bfloat16)
    found = part(layer, 0, 4)(hidden.to(torch.bfloat16), experts, weights.to(torch.bfloat16))
    same(found.dtype, torch.bfloat16, on="4 tokens in bfloat16, rank 0 of 2: the type of the result")


def test_only_chosen_pairs_are_computed(part: Any) -> None:
    """A rank computes a pair of a token and an expert if the token has chosen it and the expert is its own."""
    hidden, experts, weights = drawn(16)
    layer = Layer(0, 4)
    part(layer, 0, 4)(hidden, experts, weights)
    pairs = sum(rows * columns for rows, columns in layer.asked)
    hint = "Zeros as weights would give the right sum, and compute every expert of another rank with one of this rank."
    same(
        pairs,
        int((experts < 4).sum()),
        on="16 tokens, rank 0 of 2: the pairs that its experts were asked for",
        hint=hint,
    )


def test_its_inputs_do_not_change(part: Any) -> None:
    """Hidden states, experts and weights are as before: the other layers read them, too."""
    inputs = drawn(6)
    before = [each.clone() for each in inputs]
    part(Layer(0, 4), 0, 4)(*inputs)
    for name, each, old in zip(("hidden", "experts", "weights"), inputs, before, strict=True):
        same(each, old, on=f"{name} after the call", hint="Work on new tensors.")
