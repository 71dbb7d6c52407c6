"""Workloads: the requests that an engine answers, with their arrivals. By name, or from a JSONL file.

Prompts are random ordinary tokens where their content does not matter, so that the same seed gives the same requests to
every engine. `WORKLOADS` has those of `python -m benchmarks run`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from benchmarks import BenchmarkError

ORDINARY_TOKENS = (256, 4000)
"""Range of token ids of the course's tokenizer without special tokens."""
Clock = Literal["seconds", "steps", "tokens"]
Lengths = tuple[int, int]
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Request:
    """A prompt, the length of its answer, and its arrival."""

    prompt: Any
    """Token ids, a text, or a list of messages."""
    max_tokens: int
    at: float = 0.0
    """Arrival, by the clock of the workload; with `after` and seconds, counted from the end of that request."""
    after: int | None = None
    """Index of an earlier request of the same conversation: its tokens, answer included, precede `prompt`."""
    ignore_eos: bool = True
    priority: int = 0
    """For engines that have priorities; 0 is not passed on."""


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival."""

    requests: Sequence[Request]
    clock: Clock = "seconds"
    """Unit of the arrivals: seconds since the start, steps of the engine, or mean number of output tokens of the
    requests that were there at the start. With `steps` and `tokens` all engines get the same requests at the same
    places, regardless of their speed."""
    settings: Settings = field(default_factory=dict)
    """Settings of an engine that answers it, such as `{"cache": {"kv_tokens": 4096}}`."""
    at_once: int | None = None
    """Maximum number of requests at the engine: others arrive as soon as one has ended. None: no maximum."""

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, if no answer ends early."""
        return sum(request.max_tokens for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; prompts must be token ids."""
        return sum(len(request.prompt) for request in self.requests)

    def shortened(self, num_tokens: int = 4) -> "Workload":
        """Return the same prompts with answers of a few tokens: enough to warm up."""
        few = [replace(request, max_tokens=min(request.max_tokens, num_tokens)) for request in self.requests]
        return replace(self, requests=few)

    def describe(self) -> dict[str, Any]:
        """Return number and lengths of requests, for a results file."""
        prompts = [len(request.prompt) for request in self.requests]
        outputs = [request.max_tokens for request in self.requests]
        return {
            "num_requests": len(prompts),
            "num_prompt_tokens": sum(prompts),
            "num_output_tokens": sum(outputs),
            "prompt_lens": [min(prompts), max(prompts)],
            "output_lens": [min(outputs), max(outputs)],
        }


def tokens(rng: Random, count: int) -> list[int]:
    """Draw ordinary token ids."""
    return [rng.randrange(*ORDINARY_TOKENS) for _ in range(count)]


def drawn(number: int, *, prompts: Lengths, outputs: Lengths, seed: int, shared: int = 0) -> Workload:
    """Draw requests with lengths between these ends, both included; the first `shared` tokens of all are the same."""
    rng = Random(seed)
    sizes = [(rng.randint(*prompts), rng.randint(*outputs)) for _ in range(number)]
    first = tokens(rng, shared)
    return Workload([Request(first + tokens(rng, length - shared), output) for length, output in sizes])


def streams_beside(
    prompts: Sequence[Request], *, number: int, num_tokens: int, clock: Clock, seed: int, prompt_len: int = 64
) -> Workload:
    """Return streams of `num_tokens` tokens from the start, and prompts that arrive while they run."""
    rng = Random(seed)
    streams = [Request(tokens(rng, prompt_len), num_tokens) for _ in range(number)]
    return Workload([*streams, *prompts], clock)


# --- by name ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """Arguments of a named workload."""

    number: Any
    """Number of requests; of a file, None is all of them."""
    rate: float | None
    """Requests per second, at random times (Poisson); None: all are there at the start."""
    seed: int

    def arrivals(self) -> Iterator[float]:
        """Yield arrival times in seconds."""
        rng, at = Random(f"arrivals/{self.seed}"), 0.0
        while True:
            yield at
            at += rng.expovariate(self.rate) if self.rate else 0.0


def ragged(args: Arguments) -> Workload:
    """Prompts of 16 to 256 tokens, answers of 16 to 96, nothing in common."""
    work = drawn(args.number, prompts=(16, 256), outputs=(16, 96), seed=args.seed)
    return replace(work, requests=[replace(r, at=at) for r, at in zip(work.requests, args.arrivals(), strict=False)])


def shared(args: Arguments) -> Workload:
    """A common prefix of 384 tokens for every eight requests, 32 own tokens and 24 output tokens for each of them."""
    rng = Random(args.seed)
    prefixes = [tokens(rng, 384) for _ in range(args.number // 8 + 1)]
    arrivals = args.arrivals()
    requests = [Request(prefixes[i // 8] + tokens(rng, 32), 24, next(arrivals)) for i in range(args.number)]
    return Workload(requests)


def chat(args: Arguments) -> Workload:
    """Conversations of three turns behind one system prompt of 128 tokens: a turn begins with all turns before it."""
    rng, arrivals, requests = Random(args.seed), args.arrivals(), list[Request]()
    system = tokens(rng, 128)
    for number in range(args.number):
        is_first = number % 3 == 0
        own = tokens(rng, rng.randint(16, 64))
        at = next(arrivals) if is_first else 0.0
        requests.append(Request(system + own if is_first else own, 32, at, None if is_first else number - 1))
    return Workload(requests)


def streams(args: Arguments) -> Workload:
    """Four streams of 128 tokens, and prompts of 512 tokens while they run: every 12 tokens of a stream, or by rate."""
    rng, arrivals = Random(args.seed), args.arrivals()
    places = [next(arrivals) if args.rate else 12.0 * (i + 1) for i in range(args.number)]
    prompts = [Request(tokens(rng, 512), 8, at) for at in places]
    clock: Clock = "seconds" if args.rate else "tokens"
    return streams_beside(prompts, number=4, num_tokens=128, clock=clock, seed=args.seed + 1)


def memory(args: Arguments) -> Workload:
    """Twelve conversations, the first ones more often than the last, in a KV memory of 1,280 tokens: too few for all.
    A turn arrives every eight steps, or by rate."""
    rng, arrivals, requests = Random(args.seed), args.arrivals(), list[Request]()
    system, last = tokens(rng, 128), dict[int, int]()
    ranks = range(12)
    for number in range(args.number):
        (rank,) = rng.choices(ranks, [1 / (rank + 1) for rank in ranks])
        own, after = tokens(rng, rng.randint(16, 48)), last.get(rank)
        at = 8.0 * number if args.rate is None else next(arrivals) if after is None else len(ranks) / args.rate
        requests.append(Request(own if rank in last else system + own, 16, at, after))
        last[rank] = number
    clock: Clock = "seconds" if args.rate else "steps"
    return Workload(requests, clock, {"cache": {"kv_tokens": 1280}})


def day(args: Arguments) -> Workload:
    """A piece of the recorded day of many tenants, another one for each seed, in a KV memory of 16,384 tokens: too few
    for all. A request arrives every 24 steps, so that few wait, or by rate."""
    arrivals = args.arrivals() if args.rate else (24.0 * number for number in range(args.number))
    requests = recorded_requests(args.number, first=(args.seed - 1) * args.number)
    requests = [replace(request, at=at) for request, at in zip(requests, arrivals, strict=False)]
    return Workload(requests, "seconds" if args.rate else "steps", {"cache": {"kv_tokens": 16384}})


def recorded_requests(number: int | None = None, *, first: int = 0) -> list[Request]:
    """Return so many requests of the recorded day, or all, with the token ids of the course's tokenizer. After its last
    request the day begins again."""
    from benchmarks.m4.traffic import recorded

    trace, (low, high) = recorded(), ORDINARY_TOKENS
    chosen = [trace[(first + index) % len(trace)] for index in range(len(trace) if number is None else number)]
    return [
        Request([low + token % (high - low) for token in traced.token_ids()[: traced.prompt]], traced.output)
        for traced in chosen
    ]


def text(kind: str) -> Callable[[Arguments], Workload]:
    """Return the maker of questions of one kind, answered to their end, with n-gram drafts where the engine has any."""

    def make(args: Arguments) -> Workload:
        from benchmarks.texts import all_questions, message

        arrivals = args.arrivals()
        asked = [[message(text)] for text in all_questions(args.number, args.seed)[kind]]
        requests = [Request(messages, 160, next(arrivals), ignore_eos=False) for messages in asked]
        return Workload(requests, settings={"speculative": {"method": "ngram"}})

    make.__doc__ = {
        "repeat": "Texts to be repeated: the answer stands in the prompt, so that n-gram drafts are right.",
        "recall": "Questions about a list of facts in the prompt: drafts are right in part.",
        "explain": "Questions whose answers stand in the weights alone: n-gram drafts are mostly wrong.",
    }[kind]
    return make


def pictures(args: Arguments) -> Workload:
    """Questions about pictures of 256 x 256 pixels, two questions for each picture. m6 only."""
    from benchmarks.texts import picture_message

    first, questions = 10_000 * args.seed, ("Describe the picture.", "What is at the center?")
    requests = [
        Request(picture_message(first + number // 2, questions[number % 2]), 24, at)
        for number, at in zip(range(args.number), args.arrivals(), strict=False)
    ]
    return Workload(requests)


WORKLOADS: dict[str, tuple[int, Callable[[Arguments], Workload]]] = {
    "ragged": (32, ragged),
    "shared": (32, shared),
    "chat": (36, chat),
    "streams": (9, streams),
    "memory": (48, memory),
    "day": (120, day),
    "repeat": (12, text("repeat")),
    "recall": (12, text("recall")),
    "explain": (12, text("explain")),
    "pictures": (12, pictures),
}
"""Default number of requests, and the function that makes them."""


def named(name: str, *, number: int | None, rate: float | None, seed: int) -> Workload:
    """Return the workload of this name, or of this JSONL file. Raises `BenchmarkError` for neither."""
    if name.endswith(".jsonl"):
        return from_file(Path(name), Arguments(number, rate, seed))
    if name not in WORKLOADS:
        raise BenchmarkError(f"there is no workload {name!r}: use {', '.join(WORKLOADS)}, or a file FILE.jsonl")
    default, make = WORKLOADS[name]
    return make(Arguments(number or default, rate, seed))


# --- from a file ------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A request in a file."""

    prompt: str | list[int] | None = None
    """A text or token ids; or `messages`, a conversation."""
    messages: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32
    at: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds since the start; with `after`, since the end of that request."""
    after: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of an earlier request, from 0, which this one continues."""
    ignore_eos: bool = False


def from_file(path: Path, args: Arguments) -> Workload:
    """Read a `Line` of JSON for each request; empty lines do not count. With a rate, requests without `after` arrive at
    its random times in place of `at`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"the workload {path} cannot be read: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][: args.number]
    requests = [_request(f"{path}, line {number}", line, index) for index, (number, line) in enumerate(filled)]
    if not requests:
        raise BenchmarkError(f"the workload {path} has no requests")
    if args.rate:
        arrivals = args.arrivals()
        requests = [replace(r, at=next(arrivals)) if r.after is None else r for r in requests]
    return Workload(sorted(requests, key=lambda r: r.at) if all(r.after is None for r in requests) else requests)


def _request(place: str, line: str, index: int) -> Request:
    try:
        row = msgspec.json.decode(line, type=Line)
    except msgspec.MsgspecError as error:
        raise BenchmarkError(f"{place}: {error}") from error
    if (row.prompt is None) == (row.messages is None) or not (row.prompt or row.messages):
        raise BenchmarkError(f"{place} must have either a prompt or messages, and they must not be empty")
    if row.after is not None and row.after >= index:
        raise BenchmarkError(f"{place}: after={row.after} is not the number of an earlier request")
    return Request(row.prompt or row.messages, row.max_tokens, row.at, row.after, row.ignore_eos)
