"""What the notebooks lean on: `check` grades an exercise by its behaviour, `show_source` quotes code from the packages.

A grader runs the reader's answer beside the package's own on inputs that tell the typical mistakes apart, and says
which one it sees. It looks at results only, never at how they came about. A wrong answer is a verdict and not an
exception, so that a notebook with open exercises still runs to its end.
"""

import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import torch
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from m1_single_request import LLMEngine, SamplingParams
from m1_single_request.events import Batch
from m1_single_request.model_loader import head_dim
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.sampler import SamplerOutput, filtered_probs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.stop_checker import held_back as reference_held_back
from m1_single_request.tracer import TraceRecord

try:  # in the checkout, for the tests
    from notebooks.hints import HINTS
    from notebooks.progress import record
except ModuleNotFoundError:  # beside the notebook
    from hints import HINTS  # type: ignore[no-redef]
    from progress import record  # type: ignore[no-redef]


@dataclass(frozen=True)
class Verdict:
    """What a check found. True if the answer passed."""

    exercise: str
    passed: bool
    finding: str
    hint: str = ""
    """What was asked for; it begins with its number."""

    @property
    def message(self) -> str:
        """What is to be read: the finding, and the hint in a line of its own."""
        return f"{self.finding}\n{self.hint}" if self.hint else self.finding

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        text = f"{self.exercise}: {'passed' if self.passed else 'not yet'}. {self.finding}"
        return "\n".join(textwrap.fill(each, 110) for each in (text, self.hint) if each)


class Mismatch(Exception):
    """What a grader raises when the answer differs from the reference; the message is for the reader."""


Grader = Callable[[Any], str]
"""Takes the reader's answer, returns what was checked; raises `Mismatch`."""

GRADERS: dict[str, Grader] = {}


def grader(name: str) -> Callable[[Grader], Grader]:
    """Register a grader under the name by which notebooks call it."""

    def register(function: Grader) -> Grader:
        GRADERS[name] = function
        return function

    return register


def check(exercise: str, answer: Any, *, hint: int | None = None) -> Verdict:
    """Grade `answer`; `hint`, 1 or 2, adds one of the exercise's hints to the verdict. An exercise that passes is
    recorded (`progress.py`).

    Raises `KeyError` for an exercise that does not exist, and `ValueError` for a hint that does not.
    """
    if exercise not in GRADERS:
        raise KeyError(f"there is no exercise {exercise!r}; there are {', '.join(GRADERS)}")
    shown = "" if hint is None else hint_of(exercise, hint)
    passed, finding = _graded(exercise, answer)
    if passed:
        record("exercises", exercise)
    return Verdict(exercise, passed, finding, shown)


def hint_of(exercise: str, number: int) -> str:
    """Return a hint with its number. Raises `ValueError` if the number is not 1 or 2."""
    if type(number) is not int or number not in (1, 2):
        raise ValueError(f"there is no hint {number!r}; there are hint=1 and hint=2")
    return f"Hint {number}: {HINTS[exercise][number - 1]}"


def _graded(exercise: str, answer: Any) -> tuple[bool, str]:
    """Whether an answer passes, and what was found."""
    try:
        return True, GRADERS[exercise](answer)
    except Mismatch as found:
        return False, str(found)
    except NotImplementedError:
        return False, "Nothing is written here yet."
    except Exception as error:
        return False, f"Your code raised {type(error).__name__}: {error}{_place(error, answer)}"


def _place(error: Exception, answer: Any) -> str:
    """The last line of the answer's cell that ran before the error, if there is one."""
    functions = vars(answer).values() if isinstance(answer, type) else [answer]
    files = {function.__code__.co_filename for function in functions if inspect.isfunction(function)}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files and frame.line]
    return f" (in `{lines[-1].name}`: `{lines[-1].line}`)" if lines else ""


class Listing:
    """Source code that a notebook shows in colours and a terminal as plain text."""

    def __init__(self, title: str, source: str) -> None:
        self.title = title
        self.source = source

    def __repr__(self) -> str:
        return f"{self.title}\n{self.source}"

    def _repr_html_(self) -> str:
        pre = (
            "background: #272822 !important; font-size: 0.85em; padding: 0.8em; margin: 0"  # whatever the page's theme
        )
        style = HtmlFormatter(noclasses=True, style="monokai", prestyles=pre)
        return f"<b><code>{escape(self.title)}</code></b>{highlight(self.source, PythonLexer(), style)}"


def listing(thing: Any) -> Listing:
    """The source of a class or function as it stands in the installed package."""
    thing = inspect.unwrap(thing)
    title = f"{thing.__module__.replace('.', '/')}.py: {thing.__qualname__}"
    return Listing(title, textwrap.dedent(inspect.getsource(thing)).rstrip())


def show_source(*things: Any) -> None:
    """Show the source of classes and functions in a notebook."""
    from IPython.display import display  # not needed for grading

    for thing in things:
        display(listing(thing))


# --- m1: exercises ----------------------------------------------------------------------------------------------------


@grader("m1.kv_bytes")
def grade_kv_bytes(kv_bytes: Callable[[PreTrainedConfig, int, int], int]) -> str:
    """`kv_bytes(config, num_tokens, bytes_per_value)`: the memory that the keys and values of some tokens take."""
    odd = Qwen3Config(hidden_size=252, num_hidden_layers=5, num_attention_heads=9, num_key_value_heads=3, head_dim=32)
    small = Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    llama = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    for name, config, tokens, width in (
        ("5 layers, hidden size 252, 9 heads over 3 KV heads, head_dim 32", odd, 11, 4),
        ("the shape of Qwen3-0.6B", small, 1000, 2),
        ("the shape of Llama 3 8B", llama, 8192, 2),
        ("the shape of Llama 3 8B", llama, 0, 2),
    ):
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)
        got = kv_bytes(config, tokens, width)
        if got != values * tokens * width:
            hint = f" {_kv_hint(got)}" if config is odd else ""
            raise Mismatch(
                f"{name}; {tokens:,} tokens, {width} bytes a value: that makes {values * tokens * width:,} bytes, "
                f"you say {got!r}.{hint}"
            )
    return "Three models and several lengths agree with the formula that the engine uses."


KV_FACTORS = (
    (2, 1, "Keys and values are two tensors of the same size."),
    (5, 1, "Every layer has keys and values of its own."),
    (3, 9, "Only the KV heads are kept: num_key_value_heads, not num_attention_heads."),
    (32, 252 // 9, "head_dim is not always hidden_size // num_attention_heads: the config names it."),
    (11, 1, "Every token has keys and values of its own."),
    (4, 1, "A value takes bytes_per_value bytes."),
)
"""The factors of the first case, what stands in their place when one is mistaken, and what to say then."""


def _kv_hint(got: int) -> str:
    """The fewest mistakes that explain a wrong answer to the first case."""
    for number in range(1, len(KV_FACTORS) + 1):
        for mistaken in combinations(KV_FACTORS, number):
            if got == prod(f[1] if f in mistaken else f[0] for f in KV_FACTORS):
                return " And: ".join(factor[2] for factor in mistaken)
    return ""


@grader("m1.top_p_filter")
def grade_top_p(top_p_filter: Callable[[Tensor, float], Tensor]) -> str:
    """`top_p_filter(probs, p)`: drop all but the fewest best tokens that reach p; scaling what is left is allowed."""
    rng = torch.Generator().manual_seed(0)
    cases = [
        ([0.4, 0.3, 0.2, 0.1], 0.5),
        ([0.1, 0.4, 0.2, 0.3], 0.5),
        ([0.1, 0.4, 0.2, 0.3], 0.05),
        ([0.5, 0.25, 0.125, 0.125], 0.7),
        ([0.5, 0.25, 0.25], 0.5),  # the best token alone reaches p exactly
        ([0.4, 0.3, 0.2, 0.1], 1.0),
        *((torch.rand(50, generator=rng).pow(4).tolist(), p) for p in (0.3, 0.9, 0.99)),
    ]
    for values, p in cases:
        probs = torch.tensor(values, dtype=torch.float64)
        probs /= probs.sum()
        before = probs.clone()
        got = top_p_filter(probs, p)
        if not torch.equal(probs, before):
            raise Mismatch("The function changes its input. Work on a copy: others may still read it.")
        if not isinstance(got, Tensor) or got.shape != probs.shape:
            raise Mismatch(f"A tensor of {len(values)} probabilities is wanted, you return {short(got)}.")
        _compare_top_p(probs, p, got.double(), _reference_top_p(probs, p))
    return "The same tokens are kept as in the engine's sampler, for nine distributions."


def _reference_top_p(probs: Tensor, p: float) -> Tensor:
    params = SamplingParams(temperature=1.0, top_p=p)
    row = SamplingRow(params=params, seed=0, prompt_token_ids=(0,), output_token_ids=())
    metadata = SamplingMetadata.from_rows([row], vocab_size=len(probs), device=probs.device)
    return filtered_probs(probs.log()[None], metadata)[0]


def _compare_top_p(probs: Tensor, p: float, got: Tensor, wanted: Tensor) -> None:
    case = f"With probabilities {short([round(v, 3) for v in probs.tolist()])} and p = {p}"
    kept, right = (got > 0).nonzero()[:, 0].tolist(), (wanted > 0).nonzero()[:, 0].tolist()
    if kept == right:
        if not torch.allclose(got / got.sum(), wanted / wanted.sum(), atol=1e-6):
            raise Mismatch(f"{case} the right tokens are kept, but their ratios have changed.")
        return
    if not kept:
        hint = "No token is left to draw: the best one always stays."
    elif len(kept) == len(right):
        hint = "The number of tokens is right. Is the answer back in the order of token ids, after sorting?"
    elif len(kept) < len(right):
        hint = "Too few. The token that carries the sum to p or over it stays: what counts is the sum before it."
    else:
        hint = "Too many. A token goes if the better ones reach p already; exactly p is enough."
    raise Mismatch(f"{case} the tokens {short(right)} stay, you keep {short(kept)}. {hint}")


@grader("m1.held_back")
def grade_held_back(held_back: Callable[[str, Sequence[str]], int]) -> str:
    """`held_back(text, stops)`: how many characters at the end may be the beginning of a stop string."""
    spoken = [
        ("I will look. Obs", ("Observation:",)),
        ("I will look.", ("Observation:",)),
        ("no stops", ()),
        ("", ("\n\n",)),
        ("one line\n", ("\n\n", "END")),
        ("xaab", ("ab!", "aabc")),
        ("xaba", ("abab",)),
        ("caf\u00e9 \u4e16", ("\u4e16\u754c",)),
    ]
    letters = ("".join(text) for size in range(5) for text in product("ab", repeat=size))
    spelled = [(text, stops) for text in letters for stops in (("aab",), ("ba", "abb"), ("bbbb",))]
    for text, stops in spoken + [(t, s) for t, s in spelled if not any(stop in t for stop in s)]:
        got, wanted = held_back(text, stops), reference_held_back(text, stops)
        if got == wanted:
            continue
        case = f"held_back({text!r}, {stops!r}) is {wanted}, you return {got!r}."
        if not isinstance(got, int):
            raise Mismatch(case)
        if got < wanted:
            raise Mismatch(f"{case} A stream would show the beginning of a stop string and have to take it back.")
        raise Mismatch(f"{case} Text is held back that can no longer become a stop string.")
    return "About a hundred texts: nothing is shown too early, nothing is held too long."


# --- m1: labs ---------------------------------------------------------------------------------------------------------


@grader("m1.off_by_one")
def grade_off_by_one(scheduler_class: type) -> str:
    """The lab's scheduler, repaired: the count of computed tokens leaves out the newest token."""
    prefixes = _Prefixes()
    with LLMEngine(parts={"scheduler": scheduler_class}) as engine:
        engine.tracer.attach(prefixes)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.add_request(ids_of(9), params)
        finished = list(run_steps(engine, limit=10))
    if prefixes.seen != [0, 9, 10, 11]:
        raise Mismatch(f"A prompt of 9 tokens runs at the start positions 0, 9, 10, 11; yours at {prefixes.seen}.")
    if [tokens for _, tokens in finished] != [tokens_alone([9], num=4)[9]]:
        raise Mismatch("The positions are right, but the tokens are not those of the engine's own scheduler.")
    return "Start positions 0, 9, 10, 11, and the invariants hold after every step."


class _Prefixes:
    """A trace reader that keeps how many tokens each step found in the cache."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def read(self, record: TraceRecord) -> None:
        """Keep the start position of a step."""
        if isinstance(record.event, Batch):
            self.seen += record.event.prefix_lens

    def close(self) -> None:
        """Nothing to release."""


@grader("m1.detokenizer")
def grade_detokenizer(detokenizer_class: type) -> str:
    """The lab's detokenizer, repaired: what it shows is always the beginning of what it will show."""
    with LLMEngine() as engine:
        tokenizer = engine.engine_core.input_processor.tokenizer
    cat, more = tokenizer.encode("\U0001f408"), tokenizer.encode(" more")
    plain, marked = "Plain words.", tokenizer.encode("Plain<|im_end|> words")
    cases = [
        (text, tokenizer.encode(text), True) for text in (plain, "caf\u00e9 \u4e16\u754c", "\U0001f408\U0001f600!")
    ]
    cases += [("3 of the 4 tokens of a cat", cat[:-1], True), ("these 3 and ' more'", [*cat[:-1], *more], True)]
    cases += [("a special token, to be skipped", marked, True), ("a special token, to be shown", marked, False)]
    for text, ids, skip in cases:
        detokenizer = detokenizer_class(tokenizer, skip_special_tokens=skip)
        whole, shown = tokenizer.decode(ids, skip_special_tokens=skip), ""
        for number, token_id in enumerate(ids, start=1):
            detokenizer.push(token_id)
            before, shown = shown, detokenizer.text
            if not shown.startswith(before):
                raise Mismatch(f"{text!r}: {before!r} was shown and then taken back: {shown!r}.")
            if not whole.startswith(shown):
                raise Mismatch(
                    f"{text!r}: after {number} of {len(ids)} tokens {shown!r} is shown, which is not how it goes on "
                    f"(skip_special_tokens={skip})."
                )
            if text == plain and shown != tokenizer.decode(ids[:number]):
                raise Mismatch(f"{text!r}: after {number} tokens only {shown!r} is shown. Nothing there needs to wait.")
        if shown != whole.rstrip("\ufffd"):
            raise Mismatch(
                f"{text!r}: after all {len(ids)} tokens only {shown!r} of {whole!r} is shown. Only an end that is "
                "broken may wait: broken bytes before it can no longer become a character."
            )
        if shown + detokenizer.tail() != whole:
            raise Mismatch(f"{text!r}: shown and tail() together are {shown + detokenizer.tail()!r}, not {whole!r}.")
    for text in ("one two", "\U0001f408"):
        _grade_rewind(detokenizer_class(tokenizer), text, tokenizer)
    return "Plain text at once, characters only when they are whole, broken bytes and special tokens; rewind() works."


def _grade_rewind(detokenizer: Any, text: str, tokenizer: Any) -> None:
    ids = tokenizer.encode(text)
    detokenizer.push(ids[0])
    before = detokenizer.mark()
    detokenizer.push(ids[-1])
    detokenizer.rewind(before)
    for token_id in ids[1:]:
        detokenizer.push(token_id)
    if detokenizer.text != text:
        raise Mismatch(
            f"{text!r}: one token, mark(), another, rewind(), then the rest of the tokens: the text is "
            f"{detokenizer.text!r}. Does rewind() restore everything that push() changes?"
        )


@grader("m1.output_processor")
def grade_output_processor(output_processor_class: type) -> str:
    """The lab's output processor, repaired: a stream never takes back, and holds back as little as it can."""
    with LLMEngine() as engine:
        tokenizer = engine.engine_core.input_processor.tokenizer
    end = tokenizer.eos_token_id
    half_a_cat = [*tokenizer.encode("Look \U0001f408")[:-1], end]
    cases: list[tuple[str, list[int], SamplingParams]] = [
        (
            name,
            [*tokenizer.encode(text), end],
            SamplingParams(max_tokens=64, stop=stop, include_stop_str_in_output=shown),
        )
        for name, text, stop, shown in (
            ("no stop string", "Look! It rains.", (), False),
            ("a stop string", "Look! Observation: rain", ("Observation:",), False),
            ("a stop string that is to be shown", "Look! Observation: rain", ("Observation:",), True),
            ("what looked like a stop string", "Obs. Observed rain.", ("Observation:", "rainy"), False),
            ("an end that looks like a stop string", "I will look. Obs", ("Observation:",), False),
        )
    ]
    cases.append(("an end in half a character", half_a_cat, SamplingParams(max_tokens=64)))
    scripts = [(ids, params) for _, ids, params in cases]
    streams = zip(cases, _streamed(scripts, output_processor_class), _streamed(scripts, OutputProcessor), strict=True)
    for (name, _, _), got, wanted in streams:
        where = f"{name[0].upper()}{name[1:]}: "
        if any(not isinstance(text, str) for text in got):
            raise Mismatch(f"{where}visible_text() must return a text, yours returned {short(got)}.")
        for now, later in pairwise(got):
            if not later.startswith(now):
                raise Mismatch(f"{where}the stream showed {now!r} and then took it back: {later!r}.")
        if got[-1] != wanted[-1]:
            hint = (
                "When a request has finished, nothing waits any more: all text and the detokenizer's tail() are shown."
            )
            raise Mismatch(f"{where}at the end {got[-1]!r} is shown, not {wanted[-1]!r}. {hint}")
        for number, (mine, right) in enumerate(zip(got, wanted, strict=True), start=1):
            if mine != right:
                what = "held back too long" if len(mine) < len(right) else "shown too early"
                raise Mismatch(f"{where}after step {number} {mine!r} is shown, not {right!r}: text is {what}.")
    return "Six streams: nothing taken back, nothing held too long, and all of it at the end."


class _Script:
    """A sampler that says given tokens, whatever the logits are."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = iter(token_ids)

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        return SamplerOutput((next(self.token_ids),), (None,))


def _streamed(scripts: Iterable[tuple[list[int], SamplingParams]], output_processor_class: type) -> Iterable[list[str]]:
    """The texts that a stream shows, step by step, for each script: the tokens that the model says."""
    with LLMEngine(parts={"output_processor": output_processor_class}) as engine:
        for token_ids, params in scripts:
            engine.engine_core.sampler = _Script(token_ids)
            outputs = list(engine.stream(ids_of(1), params))
            if (error := outputs[-1].error) is not None:
                raise Mismatch(f"Your code raised {type(error).__name__}: {error}.")
            yield [output.text for output in outputs]


# --- helpers ----------------------------------------------------------------------------------------------------------


def ids_of(length: int) -> list[int]:
    return [300 + (7 * i) % 101 for i in range(length)]


def run_steps(engine: LLMEngine, *, limit: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Run up to `limit` steps with the invariants checked after each; yields what finished: (request id, tokens)."""
    for _ in range(limit):
        outputs = engine.step()
        try:
            engine.engine_core.scheduler.check_invariants()
        except AssertionError as error:
            what = str(error).splitlines()[0] if str(error) else "the queues contradict each other"
            raise Mismatch(f"check_invariants() fails after step {engine.stats().num_steps}: {what}.") from error
        for rid, output in outputs.items():
            if output.error is not None:
                raise Mismatch(f"The request {rid!r} failed: {output.error}")
            if output.finished:
                yield rid, output.token_ids
        if not engine.has_unfinished_requests():
            return


def tokens_alone(lengths: Iterable[int], *, num: int = 2) -> dict[int, tuple[int, ...]]:
    """What the engine's own parts answer, by length of the prompt."""
    params = SamplingParams(max_tokens=num, ignore_eos=True)
    with LLMEngine() as engine:
        return {length: engine.generate(ids_of(length), params).token_ids for length in set(lengths)}


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:67]}..."
