"""How much a test does by default, and how much when exhaustive tests run."""

from hypothesis import settings


def examples(number: int) -> int:
    """So many examples of hypothesis where exhaustive tests run, a fifth of them by default."""
    return max(2, number * settings.default.max_examples // 100)
