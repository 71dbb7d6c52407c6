"""Typical mistakes in a sampler, each with the hint that it must get."""

from dataclasses import replace

import torch
from torch import Tensor

from m1_single_request.running_sums import search_running_sums
from m1_single_request.sampler import Sampler, adjusted, draw, filtered_probs
from m1_single_request.sampling_metadata import SamplingMetadata


class Drawing(Sampler):
    """The right tokens, in steps that a mistake can change."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        every = torch.ones_like(metadata.greedy)
        best = super().choose(logits, replace(metadata, greedy=every, all_greedy=True))
        if metadata.uniforms is None:
            return best
        is_chosen = metadata.greedy | (best == logits.shape[-1])
        return torch.where(is_chosen, best, self.drawn(adjusted(logits, metadata), metadata, metadata.uniforms))

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        return draw(filtered_probs(logits, metadata), uniforms)


class AlwaysDivides(Sampler):
    """The repetition penalty divides negative logits, too."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        if metadata.penalties is not None and metadata.seen is not None:
            repetition, *others = metadata.penalties
            logits = torch.where(metadata.seen, logits / repetition[:, None], logits)
            metadata = replace(metadata, penalties=(torch.ones_like(repetition), *others))
        return super().choose(logits, metadata)


class OwnNumbers(Drawing):
    """Draws with a generator of its own."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        return filtered_probs(logits, metadata).multinomial(1)[:, 0]


class Reaches(Drawing):
    """The sum has to reach the number, not to exceed it."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        return search_running_sums(filtered_probs(logits, metadata), uniforms, right=False)


class SinglePrecision(Drawing):
    """The number is compared in float32."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        probs = filtered_probs(logits, metadata)
        sums = (probs / probs.sum(dim=-1, keepdim=True)).cumsum(dim=-1)
        return (sums <= uniforms.float()[:, None]).sum(dim=-1)


class KeepsEqualOnes(Drawing):
    """top_k is a limit on the probability."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        if metadata.top_k is not None:
            ranked = logits.sort(dim=-1, descending=True).values
            least = ranked.gather(-1, (metadata.top_k - 1).clamp(max=logits.shape[-1] - 1)[:, None])
            logits = logits.masked_fill(logits < least, -torch.inf)
        return super().drawn(logits, replace(metadata, top_k=None), uniforms)


class BeforeTopP(Drawing):
    """top_p ends before the token that reaches it."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        if metadata.top_p is None:
            return super().drawn(logits, metadata, uniforms)
        probs = filtered_probs(logits, replace(metadata, top_p=None))
        ranked, order = (probs / probs.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        beyond = ranked.cumsum(dim=-1) > metadata.top_p[:, None]
        beyond[:, 0] = False
        return draw(probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0)), uniforms)


class SharesOfAll(Drawing):
    """top_p takes the shares of all tokens, not of those that top_k and min_p left."""

    def drawn(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Tensor) -> Tensor:
        first = filtered_probs(logits, replace(metadata, top_k=None, min_p=None))
        return draw(first * (filtered_probs(logits, replace(metadata, top_p=None)) > 0), uniforms)


class AddsInPlace(Sampler):
    """The bias is added to the caller's logits."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        if metadata.bias is None:
            return super().choose(logits, metadata)
        logits += metadata.bias
        return super().choose(logits, replace(metadata, bias=torch.zeros_like(logits)))


class ForgetsTheImpossible(Sampler):
    """A row without a possible token gets some token."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        return super().choose(logits, metadata).clamp(max=logits.shape[-1] - 1)


WRONG = [
    (BeforeTopP, "The token at which the sum reaches top_p belongs to the set"),
    (AlwaysDivides, "Dividing a negative logit"),
    (OwnNumbers, "no other random number is needed"),
    (Reaches, "The sum must exceed the number"),
    (SinglePrecision, "In float32 this number is 1"),
    (KeepsEqualOnes, "More than k tokens are as likely"),
    (SharesOfAll, "the first has a share of .57"),
    (AddsInPlace, "An operation in place"),
    (ForgetsTheImpossible, "Only a bias can forbid all"),
]
