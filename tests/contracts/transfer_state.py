"""Contract of the receiving end of a KV transfer in m6: its state, whatever messages come, and in whatever order."""

from random import Random
from typing import Any, NamedTuple

from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.disaggregation.poll import KVPoll
from m6_multimodal_pd.disaggregation.runtime.messages import Relay
from m6_multimodal_pd.errors import TransferError
from tests.contracts.part import Broken, Part, same
from tests.m6_multimodal_pd.shipped import MANY_TOKENS, PROMPTS, answers, stepped, text_group

PART = Part(
    name="transfer_state",
    target="m6_multimodal_pd.disaggregation.poll:KVReceiver",
    lesson="docs/m6_kv_transfer.md#2-kvsender-and-kvreceiver-the-two-ends-of-a-transfer",
    starter="MyKVReceiver",
)

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = KVPoll
PAGE_SIZE = 4
REFUSED = "TransferError"
"""In place of a result."""


class End:
    """A receiver, what it was told, and what it has reported of its transitions."""

    def __init__(self, part: Any, num_tokens: int = 10) -> None:
        self.calls: list[str] = []
        self.changes: list[tuple[str, str]] = []
        self.receiver = part(7, num_tokens=num_tokens, page_size=PAGE_SIZE, on_change=self._changed)
        self.about = f"{num_tokens} tokens in pages of {PAGE_SIZE}"

    def _changed(self, before: KVPoll, after: KVPoll, why: str) -> None:
        if not isinstance(why, str) or not why:
            raise Broken(self.on, "a cause, in words", why, "The third argument of `on_change` says why.")
        self.changes.append((before.name, after.name))

    @property
    def on(self) -> str:
        """What was called, as a learner would write it."""
        return f"{self.about}: {'; '.join(self.calls[-8:])}"

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method; return its result, or `REFUSED`."""
        self.calls.append(f"{name}({', '.join(map(repr, arguments))})")
        try:
            return getattr(self.receiver, name)(*arguments)
        except TransferError:
            return REFUSED

    def take(self, number: int, pages: range) -> None:
        """Tell it of a chunk as its engine does."""
        if self.call("expects", number, pages) is True:
            self.call("arrived", pages)

    def known(self) -> dict[str, Any]:
        """What others may read of it, and what it has reported."""
        end = self.receiver
        fields = {"state": end.state.name, "start": end.start, "num_chunks": end.num_chunks}
        return fields | {"next_page": end.next_page, "announced": end.announced, "reported": list(self.changes)}

    def check(self, name: str, *arguments: Any, returns: Any, hint: str = "") -> None:
        """Call a method, and compare its result."""
        found = self.call(name, *arguments)
        same(found, returns, on=self.on, hint=hint)

    def ignores(self, name: str, *arguments: Any, returns: Any, hint: str = "") -> None:
        """Call a method that must change nothing."""
        before = self.known()
        self.check(name, *arguments, returns=returns, hint=hint)
        same(self.known(), before, on=f"{self.on}; its fields, before and after the last call", hint=hint)

    def shows(self, hint: str = "", **fields: Any) -> None:
        """Compare some of its fields."""
        known = self.known()
        same({name: known[name] for name in fields}, fields, on=f"{self.on}; its fields", hint=hint)


def ready(part: Any, num_tokens: int = 10, start: int = 0) -> End:
    """A receiver that has room."""
    end = End(part, num_tokens)
    end.check("preallocated", start, returns=True)
    return end


def test_with_room_it_waits_for_input(part: Any) -> None:
    """`preallocated` moves a new transfer to WAITING_FOR_INPUT, and reports it."""
    end = ready(part)
    hint = "Every transition sets `state`, and calls `on_change` with the state before, the state after, and a cause."
    end.shows(hint, state="WAITING_FOR_INPUT", start=0, next_page=0, reported=[("BOOTSTRAPPING", "WAITING_FOR_INPUT")])
    hint = "There is room already: a message that comes twice changes nothing, and the method returns False."
    end.ignores("preallocated", 4, returns=False, hint=hint)


def test_pages_that_are_cached_do_not_come(part: Any) -> None:
    """The first page to come is the one after the cached tokens, which are whole pages of the prompt."""
    ready(part, 10, 8).shows("8 cached tokens are pages 0 and 1.", start=8, next_page=2)
    ready(part, 8, 8).shows("All of it may be cached: then no page comes.", start=8, next_page=2)
    hint = "Cached tokens are whole pages of this prompt: `start` is a multiple of the page size, from 0 to num_tokens."
    for start in (3, -4, 12):
        End(part).ignores("preallocated", start, returns=REFUSED, hint=hint)


def test_the_next_chunk_is_expected(part: Any) -> None:
    """`expects` returns True for the next chunk and changes nothing; `arrived` counts its pages."""
    end = ready(part)
    end.ignores("expects", 0, range(0, 2), returns=True, hint="`expects` only asks; `arrived` counts the chunk.")
    end.call("arrived", range(0, 2))
    end.shows("The state changes with the first pages.", state="TRANSFERRING", num_chunks=1, next_page=2)
    end.check("expects", 1, range(2, 3), returns=True, hint="The last page need not be full: 10 tokens are 3 pages.")
    end.call("arrived", range(2, 3))
    changes = [("BOOTSTRAPPING", "WAITING_FOR_INPUT"), ("WAITING_FOR_INPUT", "TRANSFERRING")]
    hint = "TRANSFERRING is entered once, and not left before the first token is there."
    end.shows(hint, state="TRANSFERRING", num_chunks=2, next_page=3, reported=changes)


def test_a_chunk_counts_once(part: Any) -> None:
    """`expects` returns False for a chunk that came before, and nothing changes."""
    end = ready(part)
    end.take(0, range(0, 1))
    end.take(1, range(1, 2))
    hint = "A message may come twice. Chunks are counted from 0, so `num_chunks` is the number of the next one."
    end.ignores("expects", 0, range(0, 1), returns=False, hint=hint)
    end.ignores("expects", 1, range(1, 2), returns=False, hint=hint)
    end.check("expects", 2, range(2, 3), returns=True, hint="Only a chunk that was counted is an old one.")


def test_a_chunk_out_of_turn_is_an_error(part: Any) -> None:
    """A chunk that is not the next one, or brings other pages than the next ones, raises `TransferError`."""
    hint = "There is no memory for its pages yet: the other side sends nothing before it knows that there is room."
    End(part).ignores("expects", 0, range(0, 1), returns=REFUSED, hint=hint)
    end = ready(part, 20)
    end.take(0, range(0, 2))
    hint = "Chunk 1 is missing: what is left out would be a hole in the KV."
    end.ignores("expects", 2, range(2, 3), returns=REFUSED, hint=hint)
    hint = "The pages of a chunk begin where those of the chunk before end."
    end.ignores("expects", 1, range(3, 4), returns=REFUSED, hint=hint)
    end.ignores("expects", 1, range(1, 3), returns=REFUSED, hint=hint)
    hint = "20 tokens are pages 0 to 4."
    end.ignores("expects", 1, range(2, 6), returns=REFUSED, hint=hint)
    hint = "Every chunk brings a page at least."
    end.ignores("expects", 1, range(2, 2), returns=REFUSED, hint=hint)
    end.check("expects", 1, range(2, 5), returns=True, hint="After an error everything is as before.")


def test_the_first_token_announces_the_chunks(part: Any) -> None:
    """`first_token_arrived` keeps the number of chunks in all, and returns False when it comes again."""
    end = ready(part)
    end.check("first_token_arrived", 2, returns=True, hint="The first token may overtake the chunks.")
    end.shows("It announces the chunks in all, and changes no state.", announced=2, state="WAITING_FOR_INPUT")
    hint = "It is announced already: a message that comes twice changes nothing."
    end.ignores("first_token_arrived", 2, returns=False, hint=hint)
    end.ignores("first_token_arrived", 3, returns=False, hint=hint)


def test_an_impossible_number_of_chunks_is_an_error(part: Any) -> None:
    """An announcement after which the transfer could never be complete raises `TransferError`."""
    hint = "There is no memory for pages yet: nothing can have been sent."
    End(part).ignores("first_token_arrived", 1, returns=REFUSED, hint=hint)
    end = ready(part, 20)
    end.take(0, range(0, 2))
    end.take(1, range(2, 3))
    hint = "Pages 3 and 4 are missing, and no chunk is to come: nobody should wait for them."
    end.ignores("first_token_arrived", 2, returns=REFUSED, hint=hint)
    hint = "More chunks have come than are announced."
    end.ignores("first_token_arrived", 1, returns=REFUSED, hint=hint)
    end.ignores("first_token_arrived", 0, returns=REFUSED, hint=hint)
    hint = "Two pages are missing, and each of the chunks to come brings one at least."
    end.ignores("first_token_arrived", 5, returns=REFUSED, hint=hint)
    end.check("first_token_arrived", 4, returns=True, hint="Two chunks may bring the two missing pages.")


def test_a_chunk_must_leave_pages_for_those_after_it(part: Any) -> None:
    """A chunk after which the announced ones could not complete the transfer raises `TransferError`."""
    end = ready(part, 20)
    end.call("first_token_arrived", 2)
    hint = "One chunk is to come after this one, and no page would be left for it."
    end.ignores("expects", 0, range(0, 5), returns=REFUSED, hint=hint)
    end.take(0, range(0, 2))
    hint = "No chunk is to come after this one, and pages would be missing."
    end.ignores("expects", 1, range(2, 4), returns=REFUSED, hint=hint)
    end.check("expects", 1, range(2, 5), returns=True, hint="The last chunk brings all that is missing.")


def test_it_is_complete_with_token_chunks_and_pages(part: Any) -> None:
    """`complete` ends the transfer once the first token and all announced chunks are there: it returns True once."""
    hint = "A transfer is complete with the first token, the announced number of chunks, and all pages; not before."
    end = ready(part)
    end.ignores("complete", returns=False, hint=hint)
    end.take(0, range(0, 1))
    end.take(1, range(1, 3))
    end.ignores("complete", returns=False, hint=hint)
    end.call("first_token_arrived", 2)
    end.check("complete", returns=True, hint=hint)
    end.shows("The last transition is reported, too.", state="SUCCESS")
    same(end.changes[-1:], [("TRANSFERRING", "SUCCESS")], on=end.on)
    hint = "It returns whether this call has completed the transfer: the request must not start twice."
    end.ignores("complete", returns=False, hint=hint)
    early = ready(part)
    early.call("first_token_arrived", 2)
    early.take(0, range(0, 2))
    early.ignores("complete", returns=False, hint="The first token is there, and one of two chunks.")
    early.take(1, range(2, 3))
    early.check("complete", returns=True, hint="The order of the messages does not matter.")


def test_nothing_needs_to_come_of_a_cached_prompt(part: Any) -> None:
    """If all pages are cached, the first token, with 0 chunks, completes the transfer."""
    end = ready(part, 8, 8)
    hint = "No page is missing, so no chunk can come."
    end.ignores("first_token_arrived", 1, returns=REFUSED, hint=hint)
    end.check("first_token_arrived", 0, returns=True, hint="0 is a number of chunks, too.")
    end.check("complete", returns=True, hint="0 is a number of chunks, too: None means that none was announced.")
    end.shows(
        "TRANSFERRING is left out.", reported=[("BOOTSTRAPPING", "WAITING_FOR_INPUT"), ("WAITING_FOR_INPUT", "SUCCESS")]
    )


def test_a_transfer_fails_once_and_from_any_state(part: Any) -> None:
    """`fail` moves a transfer that is not over to FAILED, with the cause as it was given, and returns True."""
    causes: list[str] = []
    receiver = part(7, num_tokens=10, page_size=PAGE_SIZE, on_change=lambda before, after, why: causes.append(why))
    receiver.fail("the peer is lost")
    same(causes, ["the peer is lost"], on="fail('the peer is lost'); the causes that were reported")
    for calls in ((), ("room",), ("room", "chunk")):
        end = End(part)
        if "room" in calls:
            end.call("preallocated", 0)
        if "chunk" in calls:
            end.take(0, range(0, 1))
        before = end.receiver.state.name
        end.check("fail", "aborted", returns=True, hint="A transfer may fail in any state before its end.")
        end.shows(state="FAILED")
        same(end.changes[-1:], [(before, "FAILED")], on=end.on)
        end.ignores("fail", "again", returns=False, hint="It has failed already.")


def done(part: Any) -> End:
    """A receiver whose transfer is complete."""
    end = ready(part)
    end.take(0, range(0, 3))
    end.call("first_token_arrived", 1)
    end.call("complete")
    return end


def test_the_end_is_final(part: Any) -> None:
    """After SUCCESS or FAILED no message changes anything, and none is an error: every method returns False."""
    failed = ready(part)
    failed.take(0, range(0, 2))
    failed.call("fail", "aborted")
    hint = "A message of a transfer that is over may still be on its way. It is no error, and changes nothing."
    for end in (done(part), failed):
        end.ignores("preallocated", 0, returns=False, hint=hint)
        end.ignores("expects", 0, range(0, 1), returns=False, hint=hint)
        end.ignores("expects", 1, range(2, 3), returns=False, hint=hint)
        end.ignores("expects", 9, range(7, 99), returns=False, hint=hint)
        end.ignores("first_token_arrived", 2, returns=False, hint=hint)
        end.ignores("complete", returns=False, hint=hint)
        end.ignores("fail", "again", returns=False, hint=hint)


# --- any messages -----------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The pages that are there, the chunks that came, and the announcement, in the plainest form."""

    num_pages: int
    state: KVPoll = BOOTSTRAPPING
    pages: tuple[int, ...] = ()
    num_chunks: int = 0
    announced: int | None = None

    @property
    def told(self) -> str:
        """What a learner may know before a call."""
        announced = "no number of chunks" if self.announced is None else f"{self.announced} chunks"
        there = f"there are {len(self.pages)} of {self.num_pages} pages, from {self.num_chunks} chunks and the cache"
        return f"Before this call the state is {self.state.name}; {there}; {announced} announced."

    @property
    def is_hopeless(self) -> bool:
        """Whether no further chunks can complete it."""
        if self.announced is None:
            return False
        missing, to_come = self.num_pages - len(self.pages), self.announced - self.num_chunks
        return missing != 0 if to_come == 0 else not 0 < to_come <= missing

    def after_chunk(self, number: int, pages: range) -> "Model | None":
        """With this chunk; itself if the chunk has no effect, None if it is an error."""
        if self.state in (SUCCESS, FAILED) or number < self.num_chunks:
            return self
        is_next = number == self.num_chunks and list(pages) == list(range(len(self.pages), pages.stop)) != []
        if self.state is BOOTSTRAPPING or not is_next or pages.stop > self.num_pages:
            return None
        came = self._replace(state=TRANSFERRING, pages=(*self.pages, *pages), num_chunks=number + 1)
        return None if came.is_hopeless else came

    def after_token(self, announced: int) -> "Model | None":
        if self.state in (SUCCESS, FAILED) or self.announced is not None:
            return self
        told = self._replace(announced=announced)
        return None if self.state is BOOTSTRAPPING or told.is_hopeless else told

    def after_complete(self) -> "Model":
        is_done = self.state in (WAITING, TRANSFERRING) and self.announced == self.num_chunks
        return self._replace(state=SUCCESS) if is_done else self


def test_it_is_right_after_any_messages(part: Any) -> None:
    """Whatever messages come, and in whatever order, state and counts are those of a model of pages and chunks."""
    rng = Random(1)
    for _ in range(60):
        num_tokens = rng.randrange(1, 21)
        end, model = End(part, num_tokens), Model(-(-num_tokens // PAGE_SIZE))
        for _ in range(20):
            before, draw, hint = model, rng.random(), model.told
            if draw < 0.1 or (draw < 0.5 and model.state is BOOTSTRAPPING):
                start = rng.randrange(num_tokens // PAGE_SIZE + 1)
                end.check("preallocated", start * PAGE_SIZE, returns=model.state is BOOTSTRAPPING, hint=hint)
                if model.state is BOOTSTRAPPING:
                    model = model._replace(state=WAITING, pages=tuple(range(start)))
            elif draw < 0.7:
                number = rng.choice([model.num_chunks, model.num_chunks, rng.randrange(5)])
                first = rng.choice([len(model.pages), len(model.pages), rng.randrange(5)])
                pages = range(first, first + rng.randrange(4))
                after = model.after_chunk(number, pages)
                returns = REFUSED if after is None else after is not model
                end.check("expects", number, pages, returns=returns, hint=hint)
                if after is not None and after is not model:
                    end.call("arrived", pages)
                    model = after
            elif draw < 0.85:
                announced = rng.choice([model.num_chunks, model.num_chunks + 1, rng.randrange(6)])
                after = model.after_token(announced)
                returns = REFUSED if after is None else after is not model
                end.check("first_token_arrived", announced, returns=returns, hint=hint)
                model = after or model
            elif draw < 0.97:
                model = model.after_complete()
                end.check("complete", returns=model is not before, hint=hint)
            else:
                is_over = model.state in (SUCCESS, FAILED)
                end.check("fail", "aborted", returns=not is_over, hint=hint)
                model = model if is_over else model._replace(state=FAILED)
            end.shows(hint, state=model.state.name, num_chunks=model.num_chunks, next_page=len(model.pages))
            end.shows(hint, announced=model.announced)


def test_two_engines_answer_although_messages_come_twice(part: Any) -> None:
    """A prefill and a decode engine answer as one engine does, also if every message between them comes twice."""
    done(part)  # an error here names its line, and one in an engine does not
    with text_group(prefill=1, decode=1) as group:
        links = group.engine_core.router.links
        send = links.send

        def send_twice(name: str, message: Any) -> None:
            for _ in range(2 if isinstance(message, Relay) else 1):
                send(name, message)

        links.send = send_twice
        for prompt in PROMPTS:
            group.add_request(prompt, SamplingParams(max_tokens=MANY_TOKENS))
        outputs = stepped(group).values()
        is_over = not group.has_unfinished_requests()
    hint = "A message that comes for the second time must not count."
    on = f"{len(PROMPTS)} prompts to a prefill and a decode engine; every message between these comes twice"
    same(is_over, True, on=f"{on}; is an answer complete at some time?", hint=hint)
    for output in outputs:
        same(output.error, None, on=f"{on}; the error", hint=hint)
    same(tuple(output.token_ids for output in outputs), answers(), on=on, hint=hint)
