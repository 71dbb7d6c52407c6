"""Build the deltas of m7: what is new in an output, for the chunks of a stream.

Every output of the engine has everything that its request has produced so far, so one that nobody has read may be
replaced by a newer one. A client of a stream wants each character once. So the server cuts off what it has sent
already, of each of the `n` choices of each prompt of a call. Text and tokens do not grow together: a character may need
several tokens, and text may be held back. Choices end at different times, and their outputs go on to contain them.

Explained in docs/m7_serving.md#deltas-chunks-and-the-whole.

    cp starters/stream_deltas.py my_deltas.py
    pytest --part stream_deltas=my_deltas.py:MyDeltas
"""

from collections.abc import Iterator
from typing import Any

from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m7_serving.openai.deltas import FAILED, Delta  # noqa: F401 - for you
from m7_serving.openai.usage import usage


class MyDeltas:
    """The deltas of all choices of one call."""

    def __init__(self, params: SamplingParams) -> None:
        """Given, and yours to extend. `params` are those of all prompts of the call."""
        self.params = params
        self.outputs: dict[int, RequestOutput] = {}
        """Newest output by index of the prompt."""

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        """Yield a `Delta` for each choice of a prompt that goes on, or ends with this output; in the order of
        `output.outputs`.

        `prompt` is the index of the prompt in the call. `output.outputs` has a `CompletionOutput` for each choice of
        the prompt, in any order, with its `index` (0 to `params.n` - 1), and with `text`, `token_ids` (a tuple) and
        `logprobs` (a tuple with a row for each token, or None) so far. Between two calls any number of outputs may have
        been skipped.

        Set `outputs[prompt]` to this output first, whatever it has. Then:

        - If `params.prompt_logprobs` is not None, yield nothing before `output.prompt_logprobs` has an entry for each
          of `output.prompt_token_ids`. It may be shorter before. The first delta has all that has waited.
        - A choice that has ended in an earlier delta has no delta any more, although `output.outputs` contains it.
        - A choice whose `finish_reason` is `abort` or `error` (the two in `FAILED`) has no delta.
        - Every other choice has one delta, also if nothing is new.

        The fields of a delta, in this order:

        - `choice: int`: `prompt * params.n + index`
        - `prompt: int` and `output: RequestOutput`: the arguments
        - `is_first: bool`: true in the first delta of the choice, even if it is empty
        - `text: str` and `token_ids: tuple[int, ...]`: what no delta of this choice had before
        - `logprobs: tuple[TokenLogprobs, ...] | None`: the rows of these tokens, `()` if no token is new; None if the
          `logprobs` of the choice are None, and only then
        - `finish_reason: str | None` and `stop_reason: int | str | None`: those of the choice
        """
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        """Given: return the token counts so far, of the newest outputs."""
        return usage(self.outputs.values())
