"""Typical mistakes in deltas, each with the hint that it must get."""

from collections.abc import Iterator
from typing import ClassVar

from msgspec.structs import replace

from m1_single_request.outputs import CompletionOutput, RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m7_serving.openai.deltas import FAILED, Delta, Deltas


def completion_of(delta: Delta, n: int) -> CompletionOutput:
    """The choice of a delta, with everything so far."""
    return delta.output.outputs[delta.choice % n]


class SendsAll(Deltas):
    """Every chunk has everything so far."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            whole = completion_of(delta, self.params.n)
            yield delta._replace(text=whole.text, token_ids=whole.token_ids, logprobs=whole.logprobs)


class OneCount(Deltas):
    """The characters are cut by the number of tokens."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.num_tokens: dict[int, int] = {}

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            whole = completion_of(delta, self.params.n)
            yield delta._replace(text=whole.text[self.num_tokens.get(delta.choice, 0) :])
            self.num_tokens[delta.choice] = len(whole.token_ids)


class FirstUntilText(Deltas):
    """A delta is the first one as long as nothing was sent."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.num_sent: dict[int, int] = {}

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            sent = self.num_sent.get(delta.choice, 0)
            yield delta._replace(is_first=not sent)
            self.num_sent[delta.choice] = sent + len(delta.text)


class NumbersOfOnePrompt(Deltas):
    """The choices of every prompt begin at 0."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            yield delta._replace(choice=delta.choice % self.params.n)


class AllRows(Deltas):
    """The rows of all tokens are sent again."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            yield delta._replace(logprobs=completion_of(delta, self.params.n).logprobs)


class EndsAgain(Deltas):
    """An output that contains a choice that has ended gives its end once more."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        self._finished.clear()
        yield from super().of(prompt, output)


class FailureIsAnEnd(Deltas):
    """A failed choice ends like any other."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        yield from super().of(prompt, output)
        for each in output.outputs:
            if each.finish_reason in FAILED:
                choice = prompt * self.params.n + each.index
                yield Delta(choice, prompt, output, False, "", (), None, each.finish_reason, None)


class DoesNotWait(Deltas):
    """Rows of the prompt are not waited for."""

    def _has_prompt_logprobs(self, output: RequestOutput) -> bool:
        return True


class CountsLate(Deltas):
    """An output without a delta is not kept."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        if self._has_prompt_logprobs(output):
            yield from super().of(prompt, output)


class SharedByAllCalls(Deltas):
    """What was sent is kept in the class, for all calls together."""

    sent: ClassVar[dict[int, tuple[int, int]]] = {}

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self._sent = self.sent


class NoRowsAreNone(Deltas):
    """Without new tokens there are no rows, so None."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        for delta in super().of(prompt, output):
            yield delta._replace(logprobs=delta.logprobs or None)


class CountsPlaces(Deltas):
    """The number of a choice is its place in the output."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        placed = tuple(replace(each, index=place) for place, each in enumerate(output.outputs))
        deltas = list(super().of(prompt, replace(output, outputs=placed)))
        self.outputs[prompt] = output
        yield from (delta._replace(output=output) for delta in deltas)


class KeepsTheFirstOutput(Deltas):
    """Every delta names the first output of its prompt."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.firsts: dict[int, RequestOutput] = {}

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        first = self.firsts.setdefault(prompt, output)
        yield from (delta._replace(output=first) for delta in super().of(prompt, output))


WRONG = [
    (SendsAll, "what was sent before is cut off"),
    (OneCount, "there are two counts"),
    (FirstUntilText, "A chunk with the role goes before the text, once"),
    (NumbersOfOnePrompt, "Prompt 1 has the choices 2 and 3"),
    (AllRows, "they are cut where the tokens are"),
    (EndsAgain, "takes it for an error"),
    (FailureIsAnEnd, "no chunk may look like a good end"),
    (DoesNotWait, "so it has to wait"),
    (CountsLate, "set the entry before anything else"),
    (SharedByAllCalls, "This is another call"),
    (NoRowsAreNone, "An empty tuple means that no token is new"),
    (CountsPlaces, "not its place in the output"),
    (KeepsTheFirstOutput, "the output that the delta was made of"),
]
