"""Wrong answers to the exercises about prefill and decode in engines of their own, and right variants."""

from m6_multimodal_pd.disaggregation.poll import KVReceiver
from m6_multimodal_pd.disaggregation.staging import StagedSource
from tests.notebooks.exercises import M6_PD
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M6_PD.lesson
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []

WRONG["m6_pd.delta"] = [
    (LESSON.defined("delta", {}), "Nine tokens take three positions"),
    (lambda positions: int(positions[0].max()) + 1 - positions.shape[1], "as its longer side has tokens"),
    (lambda positions: int(positions.max()) - positions.shape[1], "A text's delta is 0"),
    (lambda positions: int(positions.max()) + 2 - positions.shape[1], "Yours is one off"),
    (lambda positions: positions.shape[1] - int(positions.max()) - 1, "Nine tokens take three positions"),
    (lambda positions: None, "yours is None"),
]


def rooms(*, reuses=False, keeps_old=False, forgets_others=False, makes_for=None, finds_all=False):
    """`FirstRoom` with a mistake in it."""

    class Rooms:
        def __init__(self):
            self.of, self.receivers, self.next = {}, {}, 0

        def enter(self, rid, make):
            old = self.of.get(rid)
            room, self.next = (min({*range(99)} - set(self.receivers)) if reuses else self.next), self.next + 1
            receiver = make(room if makes_for is None else makes_for)
            if forgets_others:
                self.receivers.clear()
            if not keeps_old:
                self.receivers.pop(old, None)
            self.of[rid], self.receivers[room] = room, receiver
            return room

        def find(self, room):
            found = self.receivers.get(room)
            return found or (next(iter(self.receivers.values())) if finds_all else None)

    return Rooms


WRONG["m6_pd.rooms"] = [
    (LESSON.defined("FirstRoom", {}), "gets room 0, which an attempt had before"),
    (rooms(reuses=True), "a room is never used again"),
    (rooms(keeps_old=True), "still accepts messages"),
    (rooms(forgets_others=True), "is not found in its room"),
    (rooms(makes_for=5), "makes one receiver"),
    (rooms(finds_all=True), "of its first attempt"),
]


class Failing(rooms(keeps_old=True)):
    """Keeps old rooms, whose receivers have failed."""

    def enter(self, rid, make):
        if rid in self.of:
            self.receivers[self.of[rid]].fail("tried again")
        return super().enter(rid, make)


RIGHT += [("m6_pd.rooms", Failing)]


class Keeps(StagedSource):
    """Never frees a frame."""

    def release(self, target, number):
        pass


class KnowsOneTarget(StagedSource):
    """Frees only the frames of one engine."""

    def release(self, target, number):
        if target == "decode":
            super().release(target, number)


class TakesTheOldest(StagedSource):
    """Never waits: without free frames it frees those of the oldest ticket."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.held = []

    def send(self, target, pages):
        while (ticket := super().send(target, pages)) is None:
            super().release(target, self.held.pop(0))
        self.held.append(ticket.number)
        return ticket

    def release(self, target, number):
        if number in self.held:
            self.held.remove(number)
            super().release(target, number)


class Backwards(StagedSource):
    """Sends the last page first."""

    def send(self, target, pages):
        return super().send(target, pages[::-1])


WRONG["m6_pd.frames"] = [
    (LESSON.defined("Hasty", {"StagedSource": StagedSource}), "a frame is free only when its target has read it"),
    (Keeps, "nothing is freed"),
    (KnowsOneTarget, "a request waits without end"),
    (TakesTheOldest, "they overwrite others"),
    (Backwards, "in another order"),
]


def ready(*, always_last=False, only_whole=False, from_zero=False, inclusive=0, negative=False):
    """`pages_ready` with a mistake in it."""

    def pages_ready(num_computed, next_page, num_tokens, page_size):
        whole = num_computed // page_size
        done = -(-num_computed // page_size)
        end = done if always_last or (num_computed >= num_tokens and not only_whole) else whole
        return range(0 if from_zero else next_page, max(next_page, end) - inclusive)

    return pages_ready


RIGHT += [("m6_pd.pages_ready", ready())]
WRONG["m6_pd.pages_ready"] = [
    (ready(always_last=True), "A page that is half full waits"),
    (ready(only_whole=True), "its last page is sent, full or not"),
    (ready(from_zero=True), "the first is cached on the other side"),
    (ready(inclusive=1), "five whole pages"),
    (lambda *_: None, "yours None"),
]


WRONG["m6_pd.bytes_moved"] = [
    (lambda n, c, p, b: (n - c) * b, "whole pages are sent"),
    (lambda n, c, p, b: -(-n // p) * p * b, "is not sent again"),
    (lambda n, c, p, b: (n // p - c // p) * p * b, "the last one too"),
    (lambda n, c, p, b: -(-n // p) - c // p, "Two whole pages"),
    (lambda n, c, p, b: (-(-n // p) - c // p) * p * b / 1, "divide with //"),
]


def receiving(
    *, needs_token=True, needs_pages=True, dedupes=True, final=True, checks_announced=True, checks_chunk=True
):
    """`receive` with a mistake in it."""

    def receive(num_pages, messages):
        chunks, page, announced, state = 0, 0, None, "waiting"

        def possible(chunks, page, announced):
            missing = num_pages - page
            return not checks_announced or announced is None or min(missing, 1) <= announced - chunks <= missing

        for kind, *numbers in messages:
            if final and state != "waiting":
                break
            if kind == "lost":
                state = "failed"
            elif kind == "first_token":
                if announced is None:
                    announced = numbers[0]
                    state = state if possible(chunks, page, announced) else "failed"
            else:
                number, first, count = numbers
                if number < chunks and dedupes:
                    continue
                fits = number == chunks and first == page and count > 0 and first + count <= num_pages
                if checks_chunk and (not fits or not possible(chunks + 1, page + count, announced)):
                    state = "failed"
                    continue
                chunks, page = chunks + 1, page + count
            all_here = (chunks == announced or not needs_token) and (page == num_pages or not needs_pages)
            if state == "waiting" and all_here and (announced is not None or not needs_token):
                state = "success"
        return state

    return receive


RIGHT += [("m6_pd.receive", receiving())]
WRONG["m6_pd.receive"] = [
    (receiving(needs_token=False), "the first token with the number of chunks is missing"),
    (receiving(dedupes=False), "A chunk that comes twice counts once"),
    (receiving(final=False), "final"),
    (receiving(checks_announced=False), "it does not bring all pages"),
    (receiving(checks_chunk=False), "no later chunk can bring it"),
    (lambda num_pages, messages: "waiting", "everything is here"),
    (lambda num_pages, messages: KVReceiver, "No message has arrived"),
]


def delivering(*, skips=True, refuses_gap=True, compares=True, changes=False, returns_none=False):
    """`deliver` with a mistake in it."""

    def deliver(known, first, token_ids):
        if first > len(known) and refuses_gap:
            if returns_none:
                return None
            raise ValueError
        again = known[first : first + len(token_ids)]
        if compares and token_ids[: len(again)] != again:
            raise ValueError
        new = token_ids[len(again) :] if skips else token_ids
        if changes:
            known += new
        return new

    return deliver


WRONG["m6_pd.deliver"] = [
    (delivering(skips=False), "only the new ones are returned"),
    (delivering(refuses_gap=False), "A token is missing"),
    (delivering(returns_none=True), "yours returns None"),
    (delivering(compares=False), "that is another answer"),
    (delivering(changes=True), "which belongs to the caller"),
    (lambda known, first, token_ids: token_ids[len(known) - first :], "A token is missing"),
]
