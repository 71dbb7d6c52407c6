"""Wrong answers to the exercises about prefill and decode in engines of their own, and a right variant.

Most are the solution with a piece of its text changed.
"""

from m6_multimodal_pd.disaggregation.poll import KVReceiver
from m6_multimodal_pd.disaggregation.staging import StagedSource
from tests.notebooks.exercises import M6_PD
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M6_PD.lesson
WRONG: WrongAnswers = {}

changed = LESSON.solution("delta")
WRONG["m6_pd.delta"] = [
    (LESSON.defined("delta", {}), "Nine tokens take three positions"),
    (changed("positions.max()", "positions[0].max()"), "as its longer side has tokens"),
    (changed(" + 1", ""), "A text's delta is 0"),
    (changed("+ 1", "+ 2"), "Yours is one off"),
    (lambda positions: positions.shape[1] - int(positions.max()) - 1, "Nine tokens take three positions"),
    (lambda positions: None, "yours is None"),
]

NEXT_ROOM, OLD_IS_GONE = "self.next, self.next + 1", "self.receivers.pop(self.rooms.get(rid), None)"
FOUND = "return self.receivers.get(room)"
changed = LESSON.solution("FirstRoom")
WRONG["m6_pd.rooms"] = [
    (LESSON.defined("FirstRoom", {}), "gets room 0, which an attempt had before"),
    (changed(NEXT_ROOM, "min({*range(99)} - set(self.receivers)), 0"), "a room is never used again"),
    (changed(OLD_IS_GONE, ""), "still accepts messages"),
    (changed(OLD_IS_GONE, "self.receivers.clear()"), "is not found in its room"),
    (changed("make(room)", "make(5)"), "makes one receiver"),
    (changed(FOUND, f"{FOUND} or next(iter(self.receivers.values()), None)"), "of its first attempt"),
]
OLD_HAS_FAILED = "rid in self.rooms and self.receivers[self.rooms[rid]].fail('tried again')"
RIGHT: RightAnswers = [("m6_pd.rooms", changed(OLD_IS_GONE, OLD_HAS_FAILED))]


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

changed = LESSON.solution("pages_ready")
WRONG["m6_pd.pages_ready"] = [
    (changed("num_computed // page_size", "-(-num_computed // page_size)"), "A page that is half full"),
    (changed("-(-num_tokens // page_size) if done else", ""), "its last page is sent, full or not"),
    (changed("range(next_page,", "range(0,"), "the first is cached on the other side"),
    (changed("max(next_page, end)", "max(next_page, end) - 1"), "five whole pages"),
    (lambda *_: None, "yours None"),
]

WRONG["m6_pd.bytes_moved"] = [
    (lambda n, c, p, b: (n - c) * b, "whole pages are sent"),
    (lambda n, c, p, b: -(-n // p) * p * b, "is not sent again"),
    (lambda n, c, p, b: (n // p - c // p) * p * b, "the last one too"),
    (lambda n, c, p, b: -(-n // p) - c // p, "Two whole pages"),
    (lambda n, c, p, b: (-(-n // p) - c // p) * p * b / 1, "divide with //"),
]

POSSIBLE = "announced is None or min(missing, 1) <= announced - chunks <= missing"
changed = LESSON.solution("receive")
WRONG["m6_pd.receive"] = [
    (changed("chunks == announced", "page == num_pages"), "the first token with the number of chunks is"),
    (changed("number < chunks", "False"), "A chunk that comes twice counts once"),
    (changed('kind == "lost":\n            return "failed"', 'kind == "lost":\n            continue'), "final"),
    (changed(POSSIBLE, "True"), "it does not bring all pages"),
    (changed("not fits or not possible(chunks + 1, page + count, announced)", "False"), "no later chunk can"),
    (lambda num_pages, messages: "waiting", "everything is here"),
    (lambda num_pages, messages: KVReceiver, "No message has arrived"),
]

GAP, NEW = 'raise ValueError(f"tokens {len(known)} to {first - 1} are missing")', "list(token_ids[len(again) :])"
changed = LESSON.solution("deliver")
WRONG["m6_pd.deliver"] = [
    (changed(NEW, "token_ids"), "only the new ones are returned"),
    (changed("first > len(known)", "False"), "A token is missing"),
    (changed(GAP, "return None"), "yours returns None"),
    (changed('raise ValueError("this is another answer")', "pass"), "that is another answer"),
    (changed(f"return {NEW}", f"new = {NEW}\n    known += new\n    return new"), "belongs to the caller"),
    (lambda known, first, token_ids: token_ids[len(known) - first :], "A token is missing"),
]
