"""The duration of a step by its number of new tokens, measured once when the engine is built.

`target_gap_ms` limits the duration of a step; the composer cuts prompts so that a step stays below it. A decision by
the clock would differ from run to run. So the clock is read at start-up only, the measured table is written to the
trace, and two engines with the same table make the same decisions. Neither vLLM nor SGLang has such a table.
"""

import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from m1_single_request.errors import ConfigError, shown


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a forward with the logits of its last tokens, interpolated linearly between measured sizes."""

    num_tokens: tuple[int, ...]
    """Measured numbers of new tokens in a step, strictly increasing; the first is 1."""
    step_ms: tuple[float, ...]
    """Milliseconds of a step with so many new tokens and an empty context; never decreasing."""
    context_ms: float = 0.0
    """Additional milliseconds of one prompt token for each thousand tokens of its context."""
    decode_context_ms: float = 0.0
    """The same for one token of a decode or its drafts, of which only a few share one read of the context."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "step_ms"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"{name}={shown(getattr(self, name))} of a cost table must be a tuple of numbers")
        numbers = (*self.num_tokens, *self.step_ms, self.context_ms, self.decode_context_ms)
        if not all(isinstance(x, int | float) and 0 <= x <= sys.float_info.max for x in numbers):
            raise ConfigError(f"a cost table holds numbers of at least 0, not {shown(numbers)}")
        if len(self.num_tokens) != len(self.step_ms) or len(self.num_tokens) < 2 or self.num_tokens[0] != 1:
            raise ConfigError("a cost table names at least two sizes, the first of 1 token, and the cost of each")
        rises = all(a < b for a, b in pairwise(self.num_tokens)) and all(a <= b for a, b in pairwise(self.step_ms))
        if not rises or self.step_ms[0] <= 0:
            raise ConfigError("the sizes of a cost table rise, and their costs, which are more than 0, never fall")

    def step(self, num_tokens: int, context: int = 0, decode_context: int = 0) -> float:
        """Return the milliseconds of a step with `num_tokens` new tokens.

        `context`: sum over the prompts of new tokens times tokens of context; `decode_context`: the same over decodes.
        """
        above = min(max(bisect_left(self.num_tokens, num_tokens), 1), len(self.num_tokens) - 1)
        (low, high), (low_ms, high_ms) = self.num_tokens[above - 1 : above + 1], self.step_ms[above - 1 : above + 1]
        base = low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)
        return max(base, 0.0) + (self.context_ms * context + self.decode_context_ms * decode_context) / 1000

    def largest(self, limit_ms: float, most: int, *, others: int, decode_context: int, start: int) -> int:
        """Return the largest number of prompt tokens, at most `most`, with which a step stays within `limit_ms`.

        `start`: tokens of the prompt that are computed already; `others`: new tokens of the step besides, with
        `decode_context`. 0 if one token is too many.
        """

        def cost(given: int) -> float:
            return self.step(others + given, given * start, decode_context)

        return bisect_right(range(1, most + 1), limit_ms, key=cost)


def measure(cost_of: Callable[[int, int], float], sizes: Sequence[int], *, context: int) -> CostTable:
    """Build a table from `cost_of(num_tokens, context)` in milliseconds; sizes behind the first slow one are left out.

    Each size is measured twice, in two passes, and the lower value is kept: another program may disturb one pass. A
    size that is measured below a smaller one gets the value of the smaller one.
    """
    step: dict[int, float] = {}
    for size in sizes:
        step[size] = cost_of(size, 0)
        if len(step) > 1 and step[size] > LONGEST_MS and cost_of(size, 0) > LONGEST_MS:
            break
    few, many = (max(size for size in step if size <= most) for most in (FEW_TOKENS, MANY_TOKENS))
    with_context = {size: cost_of(size, context) for size in (few, many)}
    for before, costs in ((0, step), (context, with_context)):
        for size in costs:
            costs[size] = min(costs[size], cost_of(size, before))

    def of_context(size: int) -> float:
        return 1000 * max(with_context[size] - step[size], 0.0) / (size * context)

    return CostTable(
        num_tokens=tuple(step),
        step_ms=tuple(accumulate(step.values(), max)),
        context_ms=of_context(many),
        decode_context_ms=of_context(few),
    )


def milliseconds(run: Callable[[], object]) -> float:
    """Return the shortest duration of three calls, in milliseconds, after one warm-up call.

    `run` must wait for its device, for example by reading the result: a clock on the host does not include kernels that
    still run.
    """
    run()
    laps = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        laps.append(time.perf_counter() - began)
    return min(laps) * 1e3


LONGEST_MS = 250.0
"""A size that takes longer is the last one that is measured; larger steps are extrapolated."""
FEW_TOKENS, MANY_TOKENS = 4, 128
"""Numbers of new tokens of one request that are measured with a context: a decode with drafts, and a piece of a prompt.
"""


def sizes_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself, at least two sizes."""
    return sorted({1, 2, most, *(2**i for i in range(most.bit_length()))})
