"""Wrong answers to the exercises about a server, each with the words that its refusal must hold, and right variants.

Most are the solution with a piece of its text changed.
"""

import asyncio

from m7_serving.mailbox import Mailbox
from tests.notebooks.exercises import M7
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M7.lesson
WRONG: WrongAnswers = {}

changed = LESSON.solution("Front")
ABORT, FORGET = "            self.abort(rid)\n", "            self.mailboxes.pop(rid, None)"
UNLESS_ENDED = "if rid in self.mailboxes:\n            self.engine"
ONLY_CANCELLED = f"except __import__('asyncio').CancelledError:\n{ABORT}{FORGET}\n            raise"
UNLESS_EXHAUSTED = "            rid = None\n        finally:\n            rid and self.engine.abort(rid)\n"
LATER = "            __import__('asyncio').get_running_loop().call_later(2, self.abort, rid)\n"
WRONG["m7.zombie"] = [
    (LESSON.defined("Front", {"Mailbox": Mailbox}), "computes the rest of her answer for nobody"),
    (changed(ABORT, ""), "the engine gets no abort"),
    (changed(ABORT, LATER), "does not have her mailbox"),
    (changed(UNLESS_ENDED, "if True:\n            self.engine"), "has ended, and then it is aborted"),
    (changed(FORGET, "            pass"), "memory grows"),
    (changed(f"finally:\n{ABORT}{FORGET}", ONLY_CANCELLED), "closed after 3 of 5 tokens"),
    (
        changed(ABORT, "            for each in list(self.mailboxes):\n                self.abort(each)\n"),
        "he still reads",
    ),
    (changed(ABORT, ABORT * 2), "aborted twice"),
    (changed(f"        finally:\n{ABORT}", UNLESS_EXHAUSTED), "has ended, and then it is aborted"),
]
RIGHT: RightAnswers = [
    (
        "m7.zombie",
        changed(ABORT + FORGET, "            rid in mailbox.unfinished and self.engine.abort(rid)\n" + FORGET),
    )
]

changed = LESSON.solution("Chunks")
NEW = "output.text[self.num_sent :]"
WRONG["m7.half_character"] = [
    (LESSON.defined("Chunks", {}), "what was sent cannot be taken back"),
    (changed(NEW, "output.text"), "not everything so far"),
    (changed("return new", "return new if output.finished else ''"), "comes late, or never"),
    (changed("return new", "return new.encode('ascii', 'ignore').decode()"), "late, or never"),
    (changed("self.num_sent = len(output.text)", "self.num_sent = len(output.token_ids)"), "text so far"),
    (changed("return new", "return None"), "yours is None"),
]


class WithoutMarks:
    """Decodes new tokens, and leaves out what is broken."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_sent = tokenizer, 0

    def next(self, output):
        new, self.num_sent = output.token_ids[self.num_sent :], len(output.token_ids)
        return self.tokenizer.decode(new, skip_special_tokens=True).replace("\ufffd", "")


class DecodesAll(WithoutMarks):
    """Decodes all tokens, and cuts off what was sent."""

    def next(self, output):
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        new, self.num_sent = text[self.num_sent :], len(text)
        return new


WRONG["m7.half_character"] += [
    (WithoutMarks, "it is not sent"),
    (DecodesAll, "what was sent cannot be taken back"),
    (
        type("HalfWay", (DecodesAll,), {"next": lambda self, out: DecodesAll.next(self, out).replace("\ufffd", "")}),
        "sent",
    ),
]

changed = LESSON.solution("Queues")
KEEP = "self.newest[rid] = output"
LAB = LESSON.defined("Queues", {"asyncio": asyncio})


class Unlimited(LAB):
    """Keeps everything."""

    def open(self, rid):
        self.queues[rid] = asyncio.Queue()


class DropsTheNewest(LAB):
    """Keeps the oldest outputs."""

    async def put(self, rid, output):
        if not self.queues[rid].full():
            self.queues[rid].put_nowait(output)


class OnePlace(LAB):
    """Keeps the oldest output."""

    def open(self, rid):
        self.queues[rid] = asyncio.Queue(1)

    put = DropsTheNewest.put


class Replaces(OnePlace):
    """A queue of one place, whose output is replaced."""

    async def put(self, rid, output):
        if self.queues[rid].full():
            self.queues[rid].get_nowait()
        self.queues[rid].put_nowait(output)


WRONG["m7.slow_reader"] = [
    (LAB, "step 9 is over: put() waits"),
    (Unlimited, "300 of its outputs are kept"),
    (DropsTheNewest, "8 of its outputs are kept"),
    (OnePlace, "the newest one, its end, is missing"),
    (changed("self.filled[rid].clear()", "pass", "self.newest.pop(rid)", "self.newest[rid]"), "returns once more"),
    (changed(KEEP, "self.newest.setdefault(rid, output)"), "its end, is missing"),
    (changed("self.newest[rid]", "self.newest[0]", "pop(rid)", "pop(0)"), "not its own newest output"),
    (changed("await self.filled[rid].wait()", "pass", "pop(rid)", "pop(rid, None)"), "it must wait"),
    (changed("return self.newest.pop(rid)", "return None"), "yours returns None"),
]
RIGHT.append(("m7.slow_reader", Replaces))

changed = LESSON.solution("read_events")
WRONG["m7.read_events"] = [
    (lambda reads: [read.decode().removeprefix("data: ").strip() for read in reads], "several events"),
    (
        changed('b"".join(reads).decode()', '"".join(read.decode(errors="replace") for read in reads)'),
        "inside a character",
    ),
    (lambda reads: [each.removeprefix("data: ") for each in b"".join(reads).decode().split("\n\n")[:-1]], "comment"),
    (changed('elif name == "data"', "else"), "comment"),
    (changed('events.append("\\n".join(data))', "events += data"), "joined by a line break"),
    (changed('value.removeprefix(" ")', "value"), "yours"),
    (changed("    return events", '    return events + ["\\n".join(data)] * bool(data)'), "the last one has none"),
    (changed("    return events", "    return tuple(events)"), "yours"),
    (lambda reads: None, "yours: None"),
]

changed = LESSON.solution("quantile")
WRONG["m7.quantile"] = [
    (changed(" / (count - below)", " / count"), "cumulative"),
    (changed("(rank - below)", "rank"), "cumulative"),
    (changed("count >= rank", "count > rank"), "reaches the rank"),
    (changed("return lower\n", "return bound\n"), "return it"),
    (changed("return None", "return 0.0"), "Nothing was observed"),
    (changed("lower, below = 0.0, 0", "lower, below = buckets[0][0], 0"), "The first bucket begins at 0"),
    (changed("return lower + (bound - lower) * (rank - below) / (count - below)", "return bound"), "lower half"),
    (lambda q, buckets: None, "yours None"),
    (lambda q, buckets: 0.0, "yours 0.0"),
]
