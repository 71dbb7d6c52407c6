"""A request with the option `speculate`.

The option belongs to one request: its output is the same with and without drafts, but drafts take tokens of a step's
budget, and a draft model may cost more time than it saves.
"""

from m4_radix_cache.request import Req as RadixReq


class Req(RadixReq):
    """m4's request with the option `speculate`."""

    speculate = True
    """Whether the proposer may draft tokens for this request. No effect in an engine without a proposer."""
