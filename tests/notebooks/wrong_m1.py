"""Wrong answers to the exercises of m1, each with the words that its refusal must hold, and a right variant.

Most are the solution with a piece of its text changed.
"""

from m1_single_request.output_processor import OutputProcessor
from m1_single_request.scheduler import Scheduler
from tests.notebooks.exercises import M1
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M1.lesson
WRONG: WrongAnswers = {}


def planted(name: str) -> object:
    """A class with its bug, as a lab of the notebook defines it."""
    return LESSON.defined(name, {"Scheduler": Scheduler, "OutputProcessor": OutputProcessor})


OTHER_HEAD_DIM = "(config.hidden_size // config.num_attention_heads)"
changed = LESSON.solution("kv_bytes")
WRONG["m1.kv_bytes"] = [
    (changed("2 * ", ""), "two tensors"),
    (changed("config.num_hidden_layers * ", ""), "Every layer"),
    (changed("num_key_value_heads", "num_attention_heads"), "Only the KV heads"),
    (changed("config.head_dim", OTHER_HEAD_DIM), "head_dim is not always"),
    (changed(" * num_tokens", ""), "Every token"),
    (changed(" * bytes_per_value", ""), "bytes_per_value"),
    (changed("2 * config.num_key_value_heads", "config.num_attention_heads"), "two tensors", "Only the KV"),
    (lambda config, num_tokens, bytes_per_value: None, "you say None"),
]

SCATTERED = "torch.zeros_like(probs).scatter(0, order, ranked)"
changed = LESSON.solution("top_p_filter")
WRONG["m1.top_p_filter"] = [
    (changed("cumsum(0) - ranked", "cumsum(0)"), "Too few"),
    (changed("cumsum(0) - ranked", "cumsum(0) - ranked - ranked.roll(1)"), "Too many"),
    (changed("better >= p", "better > p"), "exactly p is enough"),
    (changed(SCATTERED, "ranked"), "order of token ids"),
    (changed(SCATTERED, "probs * (probs >= p)"), "the best one always stays"),
    (changed("order, ranked)", "order, (ranked > 0).to(probs.dtype))"), "ratios have changed"),
    (changed(SCATTERED, "probs.scatter_(0, order, ranked)"), "changes its input"),
    (changed(SCATTERED, "probs.tolist()"), "A tensor of 4 probabilities"),
]

changed = LESSON.solution("held_back")
WRONG["m1.held_back"] = [
    (lambda text, stops: 0, "have to take it back"),
    (changed("min(longest, len(text)), 0, -1", "1, min(longest, len(text)) + 1"), "have to take it back"),
    (changed("[-size:]) for stop in stops", "[-size:]) for stop in stops[:1]"), "have to take it back"),
    (
        changed("if any(stop.startswith(text[-size:]) for stop in stops)", "if size < longest"),
        "can no longer become a stop string",
    ),
    (lambda text, stops: None, "you return None"),
]


COUNT = "return num_before + num_read"
changed = LESSON.solution("OffByOne")
WRONG["m1.off_by_one"] = [
    (planted("OffByOne"), "after step 1: a decoding request has KV for all tokens but the newest"),
    (
        changed(COUNT, "return sequence.get_len()"),
        "after step 1: a decoding request has KV for all tokens but the newest",
    ),
    (changed(COUNT, "return sequence.get_prompt_len()"), "check_invariants() fails after step 2"),
]
RIGHT: RightAnswers = [("m1.off_by_one", changed(COUNT, "return sequence.get_len() - 1"))]

SHOWN, WHOLE = r'self.decode(self.ids).rstrip("\ufffd")', "self.decode(self.ids)"
IS_BROKEN = r'if "\ufffd" in self.decode(self.ids) else'
PUSHED = f"""self.ids.append(token_id)
        self.text = {SHOWN}"""
LATE = """self.ids.append(token_id)
        self.late.append(token_id)
        if not (text := self.decode(self.late)).endswith("\\ufffd"):
            self.text, self.late = self.text + text, []  # forgets rewind()"""
TAIL, JOINED = f"{WHOLE}[len(self.text):]", "self.decode(self.late)"
changed = LESSON.solution("HastyDetokenizer")
WRONG["m1.detokenizer"] = [
    (planted("HastyDetokenizer"), "is shown, which is not how it goes on"),
    (changed(SHOWN, "self.text"), "Nothing there needs to wait"),
    (changed(SHOWN, f'"" {IS_BROKEN} {WHOLE}'), "was shown and then taken back"),
    (changed(f"{WHOLE}[len(self.text):]", '""'), "tail() together"),
    (changed("del self.ids[mark[0]:]", "pass"), "rewind(), then the rest of the tokens: the text is"),
    (changed(SHOWN, f"self.text {IS_BROKEN} {WHOLE}"), "Only an end that is broken may wait"),
    (changed(", skip_special_tokens=self.skip_special_tokens", ""), "skip_special_tokens=True"),
    (changed("tokens=self.skip_special_tokens", "tokens=True"), "a special token, to be shown"),
    (
        changed('self.text = ""', 'self.text, self.late = "", []', PUSHED, LATE, TAIL, JOINED),
        "'\U0001f408': one token, mark()",
    ),
]

HELD = "held_back(detokenizer.text, request.sampling_params.stop)"
MOST = "max((len(stop) - 1 for stop in request.sampling_params.stop), default=0)"
changed = LESSON.solution("HastyOutput")
WRONG["m1.output_processor"] = [
    (planted("HastyOutput"), "and then took it back"),
    (changed(HELD, f"min(len(detokenizer.text), {MOST})"), "held back too long"),
    (changed("if request.is_finished:", "if False:"), "When a request has finished, nothing waits any"),
    (changed(" + detokenizer.tail()", ""), "An end in half a character: at the end 'Look ' is shown"),
    (changed("return detokenizer.text[: len(detokenizer.text) - held]", "return None"), "return a text"),
    (changed("[: request.sequence.text_end]", ""), "at the end 'Look! Observation:"),
    (changed(HELD, "detokenizer.held"), "Your code raised AttributeError: ", "has no attribute 'held'"),
]
