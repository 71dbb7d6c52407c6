"""What a step costs, by its size: measured once, when the engine is built, and looked up ever after.

Two decisions need to know: how large a piece of a prompt may be if nobody is to wait longer than so many milliseconds
for its next token, and how many guesses are worth their verification. A clock in these decisions would make every run
another one. So the clock is read at the start only, what it said is in the trace, and whoever is given the same table
decides the same. Neither vLLM nor SGLang has one.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from m1_single_request.errors import ConfigError, shown


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a forward and the logits of its last tokens. Between two sizes a straight line is drawn."""

    num_tokens: tuple[int, ...]
    """New tokens in a step, rising, the first is 1."""
    step_ms: tuple[float, ...]
    """What a step of so many costs, with nothing before them; never falls."""
    context_ms: float = 0.0
    """What each token of a piece of a prompt costs more for each thousand tokens before it."""
    decode_context_ms: float = 0.0
    """The same for few tokens, a decode and its guesses: they share less of what is read."""
    draft_ms: float = 0.0
    """A forward of the draft model with one token, if there is one."""
    draft_row_ms: float = 0.0
    """What each further row of that forward costs."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "step_ms"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"{name}={shown(getattr(self, name))} of a cost table must be a tuple of numbers")
        more = (self.context_ms, self.decode_context_ms, self.draft_ms, self.draft_row_ms)
        numbers = (*self.num_tokens, *self.step_ms, *more)
        if not all(isinstance(x, int | float) and 0 <= x <= sys.float_info.max for x in numbers):
            raise ConfigError(f"a cost table holds numbers of at least 0, not {shown(numbers)}")
        if len(self.num_tokens) != len(self.step_ms) or len(self.num_tokens) < 2 or self.num_tokens[0] != 1:
            raise ConfigError("a cost table names at least two sizes, the first of 1 token, and the cost of each")
        rises = all(a < b for a, b in pairwise(self.num_tokens)) and all(a <= b for a, b in pairwise(self.step_ms))
        if not rises or self.step_ms[0] <= 0:
            raise ConfigError("the sizes of a cost table rise, and their costs, which are more than 0, never fall")

    def step(self, num_tokens: int, context: int = 0, decode_context: int = 0) -> float:
        """Milliseconds of a step of so many new tokens.

        `context`: of pieces of prompts, new tokens times tokens before them, summed up; `decode_context`: of decodes.
        """
        sizes, costs = self.num_tokens, self.step_ms
        above = next((i for i, size in enumerate(sizes) if size >= num_tokens), len(sizes) - 1)
        above = max(above, 1)
        (low, high), (cheap, dear) = sizes[above - 1 : above + 1], costs[above - 1 : above + 1]
        base = cheap + (dear - cheap) * (num_tokens - low) / (high - low)
        return max(base, 0.0) + (self.context_ms * context + self.decode_context_ms * decode_context) / 1000

    def draft(self, num_rows: int) -> float:
        """Milliseconds of a forward of the draft model, one token for each of so many requests."""
        return self.draft_ms + self.draft_row_ms * max(num_rows - 1, 0)

    def largest(self, limit_ms: float, most: int, *, others: int, decode_context: int, start: int) -> int:
        """How many of `most` tokens of a prompt, `start` tokens into it, fit into a step of `limit_ms`.

        The step has `others` new tokens besides, with so much context. 0 if not one does.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step(others + middle, middle * start, decode_context) <= limit_ms
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def measure(cost_of: Callable[[int, int], float], sizes: Sequence[int], *, context: int) -> CostTable:
    """A table from what `cost_of(num_tokens, context)` says, in milliseconds; the largest sizes are left out once they
    take too long.

    Everything is asked twice, in turns, and the lower answer counts: another program may disturb for a while. A size
    that still seems to cost less than a smaller one is given the same.
    """
    step: dict[int, float] = {}
    for size in sizes:
        step[size] = cost_of(size, 0)
        if len(step) > 1 and step[size] > LONGEST_MS and cost_of(size, 0) > LONGEST_MS:
            break
    few, many = (max(size for size in step if size <= most) for most in (FEW_TOKENS, MANY_TOKENS))
    behind = {size: cost_of(size, context) for size in (few, many)}
    for before, costs in ((0, step), (context, behind)):
        for size in costs:
            costs[size] = min(costs[size], cost_of(size, before))

    def of_context(size: int) -> float:
        return 1000 * max(behind[size] - step[size], 0.0) / (size * context)

    return CostTable(
        num_tokens=tuple(step),
        step_ms=tuple(accumulate(step.values(), max)),
        context_ms=of_context(many),
        decode_context_ms=of_context(few),
    )


def milliseconds(run: Callable[[], object]) -> float:
    """How long a call takes when nothing disturbs it: the quickest of three, after one that counts for nothing.

    `run` must wait for its device, say by reading the result: a clock on the host sees no kernel that still runs.
    """
    run()
    laps = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        laps.append(time.perf_counter() - began)
    return min(laps) * 1e3


LONGEST_MS = 250.0
"""A size that takes so long is the last one: beyond it the line goes on."""
FEW_TOKENS, MANY_TOKENS = 4, 128
"""So many new tokens of one request are measured with a context, and without: a decode with guesses, and a piece."""


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself, at least two."""
    return sorted({1, 2, most, *(2**i for i in range(most.bit_length()))})
