"""Typical mistakes in an n-gram proposer, each with the hint that it must get."""

from collections.abc import Sequence
from typing import Any

from m5_chunked_prefill_spec.speculative.proposer import NgramProposer


class Searching(NgramProposer):
    """Searches token by token, in the order of the reference; `starts` are the places where a copy may begin."""

    longest_first, starts_first = True, True

    def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        return [self.drafts(self.tokens(req), limit) if limit else [] for req, limit in zip(reqs, limits, strict=True)]

    def tokens(self, req: Any) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def starts(self, tokens: list[int], size: int) -> range:
        return range(len(tokens) - size)

    def drafts(self, tokens: list[int], limit: int) -> list[int]:
        sizes = range(self.prompt_lookup_min, min(self.prompt_lookup_max, len(tokens) - 1) + 1)
        for size in sorted(sizes, reverse=self.longest_first):
            for start in sorted(self.starts(tokens, size), reverse=not self.starts_first):
                if tokens[start : start + size] == tokens[-size:]:
                    return tokens[start + size : start + size + limit]
        return []


class TakesTheNewest(Searching):
    """The copy nearest to the end is used."""

    starts_first = False


class TakesTheShortest(Searching):
    """The shortest run that has a copy is used."""

    longest_first = False


class FindsItself(Searching):
    """The last tokens are a copy of themselves, behind which nothing follows."""

    starts_first = False

    def starts(self, tokens: list[int], size: int) -> range:
        return range(len(tokens) - size + 1)


class FindsItselfAtLast(Searching):
    """The search reaches the run itself, if it finds no copy before."""

    def starts(self, tokens: list[int], size: int) -> range:
        return range(len(tokens) - size + 1)


class IsAGenerator(Searching):
    """The rows come one by one."""

    def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> Any:
        yield from super().propose(reqs, limits)


class ReturnsNothing(Searching):
    """The return is forgotten."""

    def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> Any:
        super().propose(reqs, limits)


class DoesNotOverlap(Searching):
    """Only the tokens before the run are searched."""

    def starts(self, tokens: list[int], size: int) -> range:
        return range(len(tokens) - 2 * size + 1)


class ReadsThePromptOnly(Searching):
    """The answer is not searched."""

    def tokens(self, req: Any) -> list[int]:
        return list(req.origin_input_ids)


class KeepsTheTokens(Searching):
    """The tokens of a request are collected once."""

    def __init__(self, **lens: int) -> None:
        super().__init__(**lens)
        self.known: dict[str, list[int]] = {}

    def tokens(self, req: Any) -> list[int]:
        return self.known.setdefault(req.rid, super().tokens(req))


class FindsBytes(Searching):
    """A match in the bytes of the tokens is taken for a copy, wherever it begins."""

    def drafts(self, tokens: list[int], limit: int) -> list[int]:
        data = b"".join(token_id.to_bytes(4, "little") for token_id in tokens)
        for size in range(min(self.prompt_lookup_max, len(tokens) - 1), self.prompt_lookup_min - 1, -1):
            if (start := data.find(data[-4 * size :], 0, -1)) >= 0:
                return tokens[start // 4 + size : start // 4 + size + limit]
        return []


class ChangesTheAnswer(Searching):
    """The answer is appended to the list of the prompt."""

    def tokens(self, req: Any) -> list[int]:
        tokens: list[int] = req.origin_input_ids
        tokens += req.output_ids
        return tokens


WRONG = [
    (TakesTheNewest, "stop at the first copy"),
    (TakesTheShortest, "three equal tokens beat two"),
    (FindsItself, "no copy of themselves"),
    (FindsItselfAtLast, "but the last two have one"),
    (IsAGenerator, "make a list of it"),
    (ReturnsNothing, "A return is missing"),
    (DoesNotOverlap, "begins at index 0 and ends at 2"),
    (ReadsThePromptOnly, "The last tokens are those of the answer"),
    (KeepsTheTokens, "Keep nothing from the call before"),
    (FindsBytes, "at a multiple of 4 bytes"),
    (ChangesTheAnswer, "copy what you change"),
]
