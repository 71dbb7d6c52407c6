"""Who has to go when the KV memory does not suffice for the next step.

New in m3: m2's slots were as long as a request may become, so whoever was admitted got to its end. Blocks are given out
as they are needed, so they can run out under running requests. The rule is one function, so that another can be put in
its place (`parts={"preemption": ...}`). vLLM preempts the last of the running; SGLang's `retract_decode` has this rule.
"""

from collections.abc import Sequence
from typing import Protocol

from m3_paged_attention.request import Request


class PreemptionPolicy(Protocol):
    """Chooses one of the running requests."""

    def __init__(self) -> None: ...

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The request that loses its blocks. `running` is not empty, and is not changed."""


class FewestOutputsFirst:
    """Whoever loses least: fewest output tokens, then the longest prompt (most blocks come free), then the newest."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=_loss)


def _loss(request: Request) -> tuple[int, int, int]:
    sequence = request.sequence
    return sequence.get_output_len(), -sequence.get_prompt_len(), -request.number
