"""Contract of the n-gram proposer of m5: drafts that are looked up in the request's own tokens."""

from collections.abc import Sequence
from random import Random
from typing import Any

from m5_chunked_prefill_spec.request import Req
from tests.contracts.part import Broken, Part, same
from tests.m4_radix_cache.reqs import make_req

PART = Part(
    name="ngram_proposer",
    target="m5_chunked_prefill_spec.speculative.proposer:NgramProposer",
    lesson="docs/m5_chunked_prefill_spec.md#proposer-the-sources-of-guesses",
    starter="MyNgramProposer",
    variant="m5_chunked_prefill_spec-ngram",
)

SHIFT = 2**16
"""The bytes of `SHIFT` are those of 1, two places later."""


def req_of(tokens: Sequence[int], outputs: Sequence[int] = (), number: int = 0) -> Any:
    """A request with these tokens in its prompt and in its answer."""
    return make_req(number, list(tokens), outputs=list(outputs), max_tokens=64, request_class=Req)


def same_drafts(
    part: Any, tokens: Sequence[int], lens: tuple[int, int], limit: int, expected: Sequence[int], hint: str = ""
) -> None:
    """Compare the drafts of one request. `lens`: lengths of the shortest and of the longest run that is searched."""
    proposer = part(prompt_lookup_min=lens[0], prompt_lookup_max=lens[1])
    on = f"tokens {list(tokens)}, runs of {lens[0]} to {lens[1]} tokens, a limit of {limit}"
    got = proposed(proposer, [req_of(tokens)], [limit], on)
    if got == [[]] and expected:
        hint = f"No drafts: did the run find itself? A copy ends before the last token. {hint}"
    same(got, [list(expected)], on=on, hint=hint)


def proposed(proposer: Any, reqs: Sequence[Any], limits: Sequence[int], on: str) -> list[Any]:
    """What is proposed, if it is a list."""
    got = proposer.propose(reqs, limits)
    if not isinstance(got, list):
        what = "None" if got is None else f"a {type(got).__name__}"
        hint = "A return is missing." if got is None else "The engine counts the rows: make a list of it."
        raise Broken(on, Words("a list with a list of drafts for each request"), Words(what), hint)
    return got


class Words(str):
    """A text that is shown without quotes."""

    __repr__ = str.__str__


def by_hand(tokens: Sequence[int], shortest: int, longest: int, limit: int) -> tuple[list[int], str]:
    """The drafts by a search for all lengths at all places, and what was found."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                words = f"The longest run with a copy is {tokens[-size:]}; the first copy begins at index {start}."
                return list(tokens[start + size : start + size + limit]), words
    return [], "No run has a copy."


def test_what_followed_before_is_proposed(part: Any) -> None:
    """The tokens that followed the last tokens at their earlier place are proposed."""
    hint = "The drafts begin behind an earlier copy; the last tokens are no copy of themselves."
    same_drafts(part, [1, 2, 3, 4, 5, 1, 2], (2, 2), 3, [3, 4, 5], hint)


def test_new_tokens_give_no_draft(part: Any) -> None:
    """Without an earlier copy of the last tokens nothing is proposed."""
    hint = "Without a copy the list is empty: nothing else is as good a guess."
    same_drafts(part, [1, 2, 3, 4, 5], (2, 2), 3, [], hint)
    same_drafts(part, [1, 2, 3, 4, 5], (1, 4), 3, [], hint)


def test_at_most_the_limit_is_proposed(part: Any) -> None:
    """A request gets at most as many drafts as its limit, and fewer where its tokens end."""
    tokens = [1, 2, 3, 4, 1, 2]
    same_drafts(part, tokens, (2, 2), 1, [3], "The limit is the largest number of drafts.")
    same_drafts(part, tokens, (2, 2), 9, [3, 4, 1, 2], "The drafts may reach the last token of the request.")


def test_a_run_without_a_copy_does_not_count(part: Any) -> None:
    """If a longer run has no copy, a shorter one is searched."""
    hint = "The last four tokens and the last three have no copy, but the last two have one."
    same_drafts(part, [1, 2, 3, 4, 5, 1, 2], (1, 4), 3, [3, 4, 5], hint)
    same_drafts(part, [8, 3, 1, 2, 8], (1, 4), 2, [3, 1], "Only the last token alone has a copy.")


def test_the_longest_run_is_used(part: Any) -> None:
    """The longest run of last tokens that has a copy decides, even if shorter ones occur earlier."""
    hint = "A longer run is a better sign: three equal tokens beat two, wherever they are."
    same_drafts(part, [1, 2, 6, 5, 1, 2, 7, 5, 1, 2], (1, 4), 1, [7], hint)
    same_drafts(part, [2, 6, 1, 2, 7, 1, 2], (1, 4), 1, [7], hint)


def test_the_first_copy_is_used(part: Any) -> None:
    """Of several copies of this run the first one is used."""
    hint = "Search from the beginning of the request, and stop at the first copy."
    same_drafts(part, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (2, 2), 2, [3, 9], hint)
    same_drafts(part, [5, 5, 1, 5, 2, 5], (1, 1), 2, [5, 1], hint)


def test_a_run_is_not_too_short(part: Any) -> None:
    """A run that is shorter than `prompt_lookup_min` is not searched."""
    hint = "One equal token is too little with prompt_lookup_min=2: most words occur twice."
    same_drafts(part, [1, 9, 2, 9], (2, 4), 3, [], hint)
    same_drafts(part, [1, 9, 2, 9], (1, 4), 3, [2, 9], "A run of exactly prompt_lookup_min tokens is searched.")


def test_a_run_is_not_too_long(part: Any) -> None:
    """A run that is longer than `prompt_lookup_max` is not searched."""
    hint = "With prompt_lookup_max=2 only two tokens are compared; their first copy is another one."
    same_drafts(part, [1, 2, 6, 5, 1, 2, 7, 5, 1, 2], (1, 2), 1, [6], hint)
    hint = "A run of exactly prompt_lookup_max tokens is searched."
    same_drafts(part, [1, 2, 5, 8, 1, 2, 6, 8, 1, 2], (1, 3), 1, [6], hint)


def test_a_copy_may_overlap_the_last_tokens(part: Any) -> None:
    """A copy may share tokens with the last ones, if it ends before the last token."""
    hint = "The copy of [7, 7] in [7, 7, 7] begins at index 0 and ends at 2, so one token follows it."
    same_drafts(part, [7, 7, 7], (2, 2), 3, [7], hint)
    same_drafts(part, [7, 7], (1, 4), 3, [7], hint)
    same_drafts(part, [1, 2, 1, 2, 1], (2, 4), 9, [2, 1], hint)


def test_a_request_may_be_shorter_than_a_run(part: Any) -> None:
    """A request with too few tokens for a run and its copy gets no drafts, or those of a shorter run."""
    hint = "A run of all tokens of a request has no earlier copy: at most len - 1 tokens are a run."
    same_drafts(part, [7], (1, 4), 3, [], hint)
    same_drafts(part, [7, 7], (2, 4), 3, [], hint)
    same_drafts(part, [7, 8, 7], (1, 9), 3, [8, 7], hint)


def test_the_answer_counts_as_the_prompt_does(part: Any) -> None:
    """Prompt and answer are one text: the search goes through both, and the answer grows from call to call."""
    proposer, req = part(prompt_lookup_min=2, prompt_lookup_max=4), req_of([1, 2, 3, 4], outputs=[9, 1])
    on = "the prompt [1, 2, 3, 4] and the answer [9, 1], runs of 2 to 4 tokens, a limit of 4"
    same(proposed(proposer, [req], [4], on), [[]], on=on)
    req.output_ids.append(2)
    hint = "The last tokens are those of the answer; they may begin in the prompt. Keep nothing from the call before."
    more = f"{on}; then 2 is appended to the answer"
    same(proposed(proposer, [req], [4], more), [[3, 4, 9, 1]], on=more, hint=hint)
    req.output_ids.extend([3, 9, 1])
    more = f"{on}; then 2, 3, 9, 1 are appended"
    same(proposed(proposer, [req], [4], more), [[2, 3, 9, 1]], on=more, hint=hint)


def test_each_request_is_for_itself(part: Any) -> None:
    """Each request has its own limit, is searched alone, and gets its row in the order of the requests."""
    reqs = [req_of([1, 2, 3, 4, 5, 1, 2], number=number) for number in range(4)]
    reqs.append(req_of([3, 4, 7, 1, 2], number=4))
    proposer = part(prompt_lookup_min=2, prompt_lookup_max=4)
    on = "four requests [1, 2, 3, 4, 5, 1, 2] with limits 9, 2, 0, 1; and [3, 4, 7, 1, 2] with limit 4"
    hint = "One row for each request, an empty one for a limit of 0; nothing of another request is proposed."
    expected: list[list[int]] = [[3, 4, 5, 1, 2], [3, 4], [], [3], []]
    same(proposed(proposer, reqs, [9, 2, 0, 1, 4], on), expected, on=on, hint=hint)
    same(proposed(proposer, [], [], "no requests"), [], on="no requests")


def test_a_request_is_not_changed(part: Any) -> None:
    """To propose changes no request."""
    req = req_of([1, 2, 3], outputs=[1, 2])
    part(prompt_lookup_min=1, prompt_lookup_max=4).propose([req], [3])
    tokens = (req.origin_input_ids, req.output_ids, req.key.token_ids(0, 9))
    hint = "The lists of a request are its own: copy what you change."
    on = "the prompt [1, 2, 3] and the answer [1, 2] after propose()"
    same(tokens, ([1, 2, 3], [1, 2], [1, 2, 3, 1, 2]), on=on, hint=hint)


def test_tokens_are_compared_not_bytes(part: Any) -> None:
    """A copy begins at a whole token, whatever the bytes of the token ids are."""
    hint = "In bytes a copy may begin inside a token: look on behind it for one at a multiple of 4 bytes."
    same_drafts(part, [SHIFT, 2 * SHIFT, 0, 8, 1, 2], (2, 2), 2, [], hint)
    same_drafts(part, [SHIFT, 2 * SHIFT, 0, 8, 1, 2, 5, 1, 2], (2, 2), 2, [5, 1], hint)


def test_it_is_right_for_many_texts(part: Any) -> None:
    """For any tokens, lengths and limits the drafts are those of a search for all lengths at all places."""
    rng = Random(1)
    for _ in range(300):
        words = rng.choice([[0, 1], [1, 2, 3], [1, SHIFT, 257, 256], list(range(10))])
        tokens = rng.choices(words, k=rng.randint(1, 30))
        shortest = rng.randint(1, 4)
        longest, limit = rng.randint(shortest, 6), rng.randint(1, 8)
        expected, hint = by_hand(tokens, shortest, longest, limit)
        same_drafts(part, tokens, (shortest, longest), limit, expected, hint)
