"""A request with the option `speculate`.

Drafts do not change the distribution of an output. But they take tokens of a step's budget, and where most of them are
rejected, a request without drafts is faster.
"""

from m4_radix_cache.request import Req as RadixReq


class Req(RadixReq):
    """m4's request with the option `speculate`."""

    speculate = True
    """Whether the proposer may draft tokens for this request. No effect in an engine without a proposer."""
