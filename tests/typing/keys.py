"""A cache key and a list of token ids are different types: mypy rejects each in the place of the other.

With `warn_unused_ignores` mypy also fails on a line that it no longer rejects.
"""

from typing import Any

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.input_processor import check_model_len
from m1_single_request.request import Sequence
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m5_chunked_prefill_spec.speculative.proposer import NgramProposer
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem, PaddedKey
from m6_multimodal_pd.request import Req


def token_ids_are_no_key(req: Req, cache: RadixCache, proposer: NgramProposer, slots: Any) -> None:
    token_ids = req.origin_input_ids + req.output_ids
    cache.match_prefix(token_ids)  # type: ignore[arg-type]
    cache.insert(token_ids, slots, 0)  # type: ignore[arg-type]
    proposer.lookup(token_ids, 4)  # type: ignore[arg-type]


def a_key_is_no_token_ids(key: PaddedKey, items: list[MultimodalDataItem], detokenizer: IncrementalDetokenizer) -> None:
    RadixKey(key)  # type: ignore[arg-type]
    PaddedKey(key, None, items)  # type: ignore[arg-type]
    Sequence("r", key, SamplingParams(), detokenizer)  # type: ignore[arg-type]
    check_model_len(key, 8, "r")  # type: ignore[arg-type]
    list(key)  # type: ignore[call-overload]
