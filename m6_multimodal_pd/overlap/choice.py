"""Tokens that the device chooses without the host: sampled behind their logits, and read when the host needs them.

m3's sampler in two parts. The first one only queues work on a GPU, with the copy of the tokens to the host behind it.
The second one reads the copy; what was queued later does not delay it. So the next step is launched between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from m1_single_request.sampler import Sampler, asked_logprobs, sampler_output
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.row_sampler import RowSampler, without_broken_rows
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo


@dataclass(eq=False)
class Choice:
    """The tokens of a step with one row of logits per request."""

    logits: Tensor
    """`[rows, vocab]`, for the trace."""
    metadata: SamplingMetadata
    tokens: Tensor
    """int64 `[rows]`, on the host when the step has ended; so are the next two."""
    is_broken: Tensor | None
    """bool `[rows]`: rows whose logits are not finite; None: none are."""
    logprobs: tuple[Tensor, ...] = ()
    """The columns of m1's `asked_logprobs`."""

    @classmethod
    def queued(cls, sampler: Sampler, logits: Tensor, metadata: SamplingMetadata) -> "tuple[Choice, Tensor]":
        """Sample from float32 `logits` `[rows, vocab]`; return the choice, and its tokens on the device.

        Such a token is valid as an input also where its row is not.
        """
        logits, is_broken = without_broken_rows(logits)
        tokens = sampler.choose(logits, metadata)
        columns = asked_logprobs(logits, tokens, metadata) if metadata.num_logprobs else ()
        on_host = tuple(column.to("cpu", non_blocking=True) for column in columns)
        broken = is_broken.to("cpu", non_blocking=True)
        choice = cls(logits, metadata, tokens.to("cpu", non_blocking=True), broken, on_host)
        return choice, tokens.clamp(0, logits.shape[-1] - 1)

    def read(self, sampler: RowSampler, rids: Sequence[str], info: SamplingBatchInfo) -> ModelRunnerOutput:
        """Return the tokens by request, when the step has ended."""
        chosen = sampler_output(self.tokens, self.logprobs, self.metadata, self.logits.shape[-1])
        return sampler.rows(rids, info, self.logits, self.metadata, chosen, self.is_broken)
