"""Build the n-gram proposer of m5: drafts that are looked up in the text itself.

Much text occurs twice: a summary quotes, an edit repeats code, a chat repeats a name. So the last tokens of a request
are searched earlier in it, and what followed there is proposed as its next tokens. The model verifies these drafts: a
wrong one costs time and never changes an answer. What is hard are the ends: the last tokens must not find themselves,
but a copy may overlap them.

Explained in docs/m5_chunked_prefill_spec.md#proposer-the-sources-of-guesses.

    cp starters/ngram_proposer.py my_ngram.py
    pytest --part ngram_proposer=my_ngram.py:MyNgramProposer
"""

from collections.abc import Sequence

from m5_chunked_prefill_spec.request import Req


class MyNgramProposer:
    """Finds an earlier copy of the last tokens, and proposes the tokens that followed it.

    The tokens of a request are `req.origin_input_ids + req.output_ids`, its prompt and its answer so far: two lists of
    token ids, one text. The answer grows from call to call. The same tokens as bytes are `req.key.data`, 4 bytes each:
    `bytes.find` is faster than a loop over a list, but a match in bytes may begin inside a token, and such a match is
    no copy. You may use either.
    """

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """Given: the length of the shortest and of the longest run of last tokens that is searched, in tokens."""
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """Return one list of drafts for each request, in the order of `reqs`: at most `limits[i]` token ids.

        A *run* is the last n tokens of a request, for n from `prompt_lookup_min` to `prompt_lookup_max`. A *copy* of
        it is the same n tokens at an earlier place: it ends before the last token, and may overlap the run. So a run of
        all tokens has no copy. Use the longest run that has a copy, and of its copies the first in the text. The drafts
        are the tokens behind the copy: `limits[i]` of them, or fewer if the text ends there.

        The list is empty if no run has a copy, or if the limit is 0. Each request is searched alone. Change no request,
        and keep nothing for the next call.
        """
        raise NotImplementedError
