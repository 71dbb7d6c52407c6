"""Requests as intake makes them."""

from collections.abc import Sequence

from m1_single_request import SamplingParams
from m1_single_request.request import RequestStatus
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req
from tests.m4_radix_cache.caches import put
from tests.testbed.fakes import make_request


def make_req(
    number: int,
    prompt: Sequence[int],
    *,
    outputs: Sequence[int] = (),
    max_tokens: int = 16,
    priority: int = 0,
    parent_id: str | None = None,
    extra_key: str | None = None,
    is_retracted: bool = False,
    prompt_logprobs: int | None = None,
    request_class: type[Req] = Req,
) -> Req:
    """The request `r<number>`, the `number`-th to arrive."""
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    req = make_request(f"r{number}", prompt, params, request_class=request_class)
    assert isinstance(req, Req)
    req.number, req.priority, req.parent_id = number, priority, parent_id
    req.extra_key = extra_key
    req.output_ids.extend(outputs)
    if is_retracted:
        req.status = RequestStatus.PREEMPTED
    return req


def fill(cache: BasePrefixCache, tokens: Sequence[int], extra_key: str | None = None) -> None:
    """Let the cache have the whole pages of these tokens, as if a request had computed them and ended."""
    put(cache, tokens[: len(tokens) // cache.page_size * cache.page_size], extra_key=extra_key)
