"""Build the sampler of m1: from the logits of a batch to one token per row.

Each request has its own settings, and all rows are computed together: a setting is a tensor with one value per row. The
order of the settings decides what they mean, and the tokens at the edge (equal ones, impossible ones, the last one that
top_p keeps) are where samplers differ. The random number of a row is given, so a token is certain, and can be tested.

Explained in docs/m1_single_request.md#sampler-logits-to-a-token.

    cp starters/sampler.py my_sampler.py
    pytest --part sampler=my_sampler.py:MySampler

`MySampler.__call__`, which the engine calls, is inherited: it converts the logits to float32, calls `choose`, and adds
the log-probabilities. You write `choose`. The functions below it are a proposal; nothing but `choose` is called from
outside.
"""

from torch import Tensor

from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata


class MySampler(Sampler):
    """Chooses tokens. It stores nothing: all settings are in the metadata."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return one token id per row of `logits`, float32 `[rows, vocab]`: int64 `[rows]`. Do not modify `logits`.

        A row with `metadata.greedy` (bool `[rows]`) gets the token with the largest logit after `adjusted`; of equal
        ones that with the lowest id. Every other row draws. If `metadata.all_greedy` is True, no row draws, and
        `metadata.uniforms` is None.

        A bias may forbid every token of a row: all its logits are minus infinity then. Such a row gets the id `vocab`,
        one more than the last token has, whether it draws or not. The other rows are not concerned. (The softmax of
        such a row is not a number.)

        What a row gets never depends on the other rows.
        """
        raise NotImplementedError


def adjusted(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the logits with bias and penalties, in this order. `[rows, vocab]` in and out.

    - `metadata.bias`, float32 `[rows, vocab]`, is added. Minus infinity forbids a token. None if no row has a bias.
    - `metadata.penalties` is a tuple of three tensors, float32 `[rows]`: repetition, frequency, presence. None if no
      row has a penalty. In rows without one they are 1, 0 and 0, which change nothing.
    - Repetition: if `metadata.seen` (bool `[rows, vocab]`: the token is in the prompt or in the output) is True, a
      positive logit is divided by it, and a negative one multiplied. So the token always becomes less likely.
    - Then frequency, once for each time that the token is in the output, and presence, once if it is there at all, are
      subtracted. `metadata.output_counts`, float32 `[rows, vocab]`, has the number of times; the prompt is not counted.
    """
    raise NotImplementedError


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the probabilities to draw from, `[rows, vocab]`: the softmax of `logits / temperature`, then min_p, top_k
    and top_p. A token that one of them removes gets 0. The sum of a row is of no importance.

    - `metadata.temperature`, float32 `[rows]`, is never 0.
    - `metadata.min_p`, float32 `[rows]`: removes the tokens that are less likely than min_p times the best.
    - `metadata.top_k`, int64 `[rows]`: keeps exactly k tokens, the most likely; of equal ones those with lower ids.
    - `metadata.top_p`, float32 `[rows]`: keeps the fewest tokens, the most likely first, whose share of what is left
      reaches top_p. The token that reaches it is kept, so there is always one.

    Each is None if no row uses it. A row that does not use it has the value 0, `vocab` and 1: it keeps all of its
    tokens.
    """
    raise NotImplementedError


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return one token id per row, int64 `[rows]`: the first, in the order of ids, at which the sum of the
    probabilities up to it exceeds `uniforms` times the sum of all.

    `metadata.uniforms` is float64 `[rows]`: 0 or more, and less than 1, also in the last bit. (In float32 it may be 1.)
    A token of probability 0 is never drawn.
    """
    raise NotImplementedError
