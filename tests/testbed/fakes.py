"""A model that is a rule: what the engine's parts need of tokenizer, model and runner, without a single weight.

The next token is a letter that depends on every token before it and on their order, so `answer` knows what a request
must say, and a token fed in twice, left out or put at a wrong place changes everything after it. `FakeRunner` keeps for
each request what its KV would hold, and refuses to read what was never written.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from m1_single_request import SamplingParams
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import Request, Sequence as TokenSequence
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.scheduler_output import SchedulerOutput

VOCAB_SIZE = 128
EOS = 0
"""The model's end-of-sequence id. The rule never says it."""
CPU = torch.device("cpu")

# --- the rule ---------------------------------------------------------------------------------------------------------


def after(state: int, token_id: int) -> int:
    """What is left of all tokens so far, after one more."""
    return (state * 1_103_515_245 + token_id + 12_345) % 2**31


def letter(state: int, seed: int = 0) -> int:
    """The token that follows: a small letter of ASCII. Neighbouring seeds never choose the same one."""
    return 97 + (state // 2**16 + 7 * seed) % 26


def states_of(token_ids: Iterable[int], start: int = 0) -> list[int]:
    """The state after each of these tokens: what the KV of each must be."""
    return list(accumulate(token_ids, after, initial=start))[1:]


def answer(
    prompt: Iterable[int], num_tokens: int, stop_token_ids: Sequence[int] = (), *, seed: int = 0, start: int = 0
) -> tuple[int, ...]:
    """The fake model's answer to `prompt`: so many tokens, or as far as the first stop token, which belongs to it."""
    state = [start, *states_of(prompt, start)][-1]
    said: list[int] = []
    while len(said) < num_tokens and not (said and said[-1] in stop_token_ids):
        said.append(letter(state, seed))
        state = after(state, said[-1])
    return tuple(said)


# --- tokenizer and requests -------------------------------------------------------------------------------------------


class FakeTokenizer:
    """A token is a character of ASCII."""

    def decode(self, ids: Iterable[int], **_: object) -> str:
        return bytes(ids).decode("ascii")


def make_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    request_class: type[Request] = Request,
    seed: int = 0,
) -> Request:
    """A request as intake makes it."""
    detokenizer = IncrementalDetokenizer(FakeTokenizer())  # type: ignore[arg-type]
    sequence = TokenSequence(request_id, list(prompt), params, detokenizer)
    return request_class(request_id, None, sequence, seed, 0.0)


# --- the runner -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What one request sends through the model in a step."""

    req_id: str
    token_ids: Sequence[int]
    start_position: int
    new_block_ids: Sequence[int]
    num_logits: int = 1


def rows_of(scheduler_output: SchedulerOutput) -> list[Row]:
    """The rows of a decision, on the way that the engine takes."""
    batch = prepare_inputs_from_scheduler_output(scheduler_output)
    columns = (batch.req_ids, batch.token_ids, batch.start_positions, batch.block_ids, batch.num_logits)
    return [Row(*values) for values in zip(*columns, strict=True)]


class FakeRunner:
    """Follows the rule. A milestone with another kind of batch turns it into rows and calls `run`."""

    def __init__(self) -> None:
        self.states: dict[str, list[int]] = {}  # of each request: the rule's state after 0, 1, 2, ... tokens with KV
        self.owners: dict[int, str] = {}  # of each block

    def run(self, rows: Iterable[Row]) -> dict[str, list[int]]:
        """The tokens that follow each row's last `num_logits` tokens, by request id."""
        said: dict[str, list[int]] = {}
        for row in rows:
            assert row.req_id not in said, f"{row.req_id} has two rows"
            assert row.token_ids, f"{row.req_id} has an empty row"
            self._take_blocks(row)
            states = self.states.setdefault(row.req_id, [0])
            assert row.start_position < len(states), (
                f"{row.req_id} starts at {row.start_position}, but has KV for {len(states) - 1} tokens only"
            )
            del states[row.start_position + 1 :]  # what is computed again is written over
            for token_id in row.token_ids:
                states.append(after(states[-1], token_id))
            said[row.req_id] = [letter(state) for state in states[-row.num_logits :]]
        return said

    def free_request_cache(self, request_id: str) -> None:
        """Forget a request; nothing happens if it is unknown."""
        if self.states.pop(request_id, None) is not None:
            self.owners = {block: owner for block, owner in self.owners.items() if owner != request_id}

    def held_request_ids(self) -> list[str]:
        return list(self.states)

    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        return not self.states and not self.owners

    def num_kv_tokens(self, request_id: str) -> int:
        """Tokens of a request that have KV."""
        return len(self.states.get(request_id, [0])) - 1

    def _take_blocks(self, row: Row) -> None:
        for block in row.new_block_ids:
            owner = self.owners.setdefault(block, row.req_id)
            assert owner == row.req_id, f"block {block} is given to {row.req_id}, but {owner} has not left it"
