"""Wrong answers to the exercises about tiers and priorities, and right variants.

Most are the solution with a piece of its text changed.
"""

from tests.notebooks.exercises import M4_TIERS
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M4_TIERS.lesson
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []

# --- pages that are reused while they are copied ----------------------------------------------------------------------

NEXT, OLDEST = "next(iter(self.texts))", "oldest = next(iter(self.texts))"
IDLE = "next((t for t in self.texts if all(c.is_done() for c in self.copies.get(t, []))), next(iter(self.texts)))"
WAIT, STARTED, POPPED = "copy.wait()", "copy = start(self.texts[name])", "self.copies.pop(oldest, [])"
KEPT = "self.copies.setdefault(name, []).append(copy)"
changed = LESSON.solution("Reuses")
WRONG["m4_tiers.reused"] = [
    (LESSON.defined("Reuses", {}), "got the pages ['bob0', 'dan1'] (copies: one page a request)"),
    (changed(NEXT, IDLE), "The least recently used text goes, whether its copy has ended or not"),
    (
        changed(STARTED, f"{STARTED}; {WAIT}"),
        "waits for the copy of 'ann' (copies: at once)",
    ),
    (changed(KEPT, "self.copies[name] = [copy]"), "a page was given to another text before it was copied"),
    (changed(POPPED, "sum(self.copies.values(), [])"), "whose pages it does not take"),
    (changed(POPPED, POPPED + "[:1]"), "a page was given to another text before it was copied"),
    (changed(WAIT, "copy.is_done()"), "a page was given to another text before it was copied"),
    (changed(OLDEST, "*_, oldest = self.texts"), "The least recently used text goes"),
    (changed("self.texts[name] = self.texts.pop(name)", "pass"), "The least recently used text goes"),
    (changed("return self.texts[name]", "return self.free[:num_pages]"), "different pages"),
]
RIGHT.append(("m4_tiers.reused", changed(WAIT, "copy.is_done() or copy.wait()")))

# --- a reader that does not wait for its layer ------------------------------------------------------------------------

EACH, HERE = "for job in self.jobs:", "job.wait(index)"
changed = LESSON.solution("Skips")
WRONG["m4_tiers.layer_wait"] = [
    (LESSON.defined("Skips", {}), "wait for this layer of every load before you return it"),
    (changed(HERE, "job.wait()"), "layer(0) waits until 4 layers have arrived; layer 0 needs 1"),
    (changed(HERE, "job.wait(max(0, index - 1))"), "layer(1) returns the memory with 'old load 1'"),
    (changed(HERE, "job.wait(min(3, index + 1))"), "layer(0) waits until 2 layers have arrived"),
    (changed(EACH, "for job in self.jobs[-1:]:"), "'old load 1, load 2'"),
    (changed(EACH, "for job in self.jobs[:1]:"), "'load 1, old load 2'"),
    (changed(EACH, "for job in self.jobs if index == 0 else []:"), "layer(1) returns the memory with 'old load 1'"),
    (changed("return self.kv.layer(index)", ""), "must return what kv.layer(0) returns"),
]
NOT_DONE = "for job in [job for job in self.jobs if not job.is_done()]:"
RIGHT.append(("m4_tiers.layer_wait", changed(EACH, NOT_DONE)))

# --- names of pages ---------------------------------------------------------------------------------------------------

CHAINED, OF_TOKENS = "root = sha256(root + data).digest()", 'b"".join(token.to_bytes(4, "little") for token in '
changed = LESSON.solution("names")
WRONG["m4_tiers.names"] = [
    (changed(CHAINED, "name = sha256(root + data).digest()", "append(root)", "append(name)"), "get the same names"),
    (changed(CHAINED, "root = sha256((root if found else b'') + data).digest()"), "begin the chain with `root`"),
    (changed("- page_size + 1", "- page_size"), "have 10 whole pages, so there are as many names"),
    (changed("- page_size + 1", ""), "27 tokens in pages of 4 have 6 whole pages"),
    (changed(OF_TOKENS, 'b"".join(str(token).encode() for token in '), "[1, 23] and [12, 3]"),
    (changed(CHAINED, "root = bytes([len(found)]) + sha256(data).digest()"), "the names from page 0 on must change"),
    (changed(CHAINED, "root = (str(hash((root, data))) + 'x' * 16).encode()[:8]"), "Use a digest"),
    (changed("found.append(root)", "found.append(hash(root))"), "is no name that a file can have for years"),
    (changed("return found", "return found[::-1]"), "whatever comes behind them"),
    (changed("return found", "tokens.clear()\n    return found"), "changes the list of tokens"),
    (changed("return found", "return None"), "you return None"),
]
RIGHT.append(("m4_tiers.names", changed(".digest()", ".hexdigest().encode()")))

# --- who is preempted -------------------------------------------------------------------------------------------------

LOWER, ORDER = "priority - request[1] > threshold", "key=lambda request: (request[1], -request[2])"
changed = LESSON.solution("victims")
WRONG["m4_tiers.victims"] = [
    (changed("while need >= free:", "while lower:"), "There is room: nobody is preempted"),
    (changed("need >= free", "need > free"), "`need` must be less than what is free"),
    (changed(ORDER, "key=lambda request: -request[2]"), "The lowest priority goes first"),
    (changed(ORDER, "key=lambda request: request[1:3]"), "Of equal priorities the newest goes first"),
    (changed("> threshold", ">= threshold"), "The difference must be more than the threshold"),
    (changed(LOWER, "priority > request[1]"), "The difference must be more than the threshold"),
    (changed("return []", "return chosen"), "All together are not enough"),
    (changed("return chosen", "return [request[0] for request in running if request[0] in chosen]"), "yours: ["),
    (changed("return chosen", "running.clear()\n    return chosen"), "changes the list of running requests"),
]
