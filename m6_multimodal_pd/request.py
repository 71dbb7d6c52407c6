"""A request whose prompt may contain images.

To the scheduler and to the memory an image is a range of tokens, so everything else is m5's. The prefix cache must not
share KV between two prompts whose placeholders are the same and whose images are not; so their keys (`key`) differ.
SGLang: `Req.multimodal_inputs` in `managers/schedule_batch.py`; vLLM: `Request.mm_features`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m5_chunked_prefill_spec.request import Req as TextReq
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs, PaddedKey
from m6_multimodal_pd.multimodal.media_pool import MediaJob
from m6_multimodal_pd.multimodal.prompt import PromptDraft


@dataclass(frozen=True)
class UnreadMedia:
    """Arguments with which a request is built again, when another process has read its images."""

    draft: PromptDraft
    jobs: Sequence[MediaJob]
    """One for each part of the draft."""
    params: SamplingParams
    options: Mapping[str, Any]
    """The other arguments of `process_request`."""


class Req(TextReq):
    """m5's request, with the images of its prompt: in its `key` they replace their placeholders."""

    multimodal_inputs: MultimodalInputs | None = None
    """The images and videos of the prompt; None for a prompt without any."""
    unread: UnreadMedia | None = None
    """Images that are not read yet. Such a request is never scheduled; another one, with their placeholders in its
    prompt, takes its place."""

    @property
    def key(self) -> RadixKey:
        """Its key in the prefix cache: the prompt with the pad values of its images, then the output tokens."""
        if self._key is None and self.multimodal_inputs is not None:
            self._key = PaddedKey(self.origin_input_ids, self.extra_key, self.multimodal_inputs.mm_items, self.rid)
        return super().key

    def take_back(self, num_tokens: int) -> None:
        """Remove the last output tokens, which were placeholders, also from the key if it has been made."""
        tokens = self.sequence.output_token_ids
        del tokens[len(tokens) - num_tokens :]
        if self._key is not None and len(self._key) > self.seqlen:
            self._key = None
