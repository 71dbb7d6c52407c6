"""Workloads: the requests that an engine answers, with their arrivals. By name, or from a JSONL file.

Prompts are random ordinary tokens where their content does not matter, so that the same seed gives the same requests to
every engine. `WORKLOADS` has those of `python -m benchmarks run`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

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
class Traffic:
    """Arguments of a named workload."""

    number: int
    rate: float | None
    """Requests per second, at random times (Poisson); None: all are there at the start."""
    seed: int

    def arrivals(self) -> Iterator[float]:
        """Yield arrival times in seconds."""
        rng, at = Random(f"arrivals/{self.seed}"), 0.0
        while True:
            yield at
            at += rng.expovariate(self.rate) if self.rate else 0.0


def ragged(traffic: Traffic) -> Workload:
    """Prompts of 16 to 256 tokens, answers of 16 to 96, nothing in common."""
    work = drawn(traffic.number, prompts=(16, 256), outputs=(16, 96), seed=traffic.seed)
    return replace(work, requests=[replace(r, at=at) for r, at in zip(work.requests, traffic.arrivals(), strict=False)])


def shared(traffic: Traffic) -> Workload:
    """A common prefix of 384 tokens for every eight requests, 32 own tokens and 24 output tokens for each of them."""
    rng = Random(traffic.seed)
    prefixes = [tokens(rng, 384) for _ in range(traffic.number // 8 + 1)]
    arrivals = traffic.arrivals()
    return Workload(
        [Request(prefixes[number // 8] + tokens(rng, 32), 24, next(arrivals)) for number in range(traffic.number)]
    )


def chat(traffic: Traffic) -> Workload:
    """Conversations of three turns behind one system prompt of 128 tokens: a turn begins with all turns before it."""
    rng, arrivals, requests = Random(traffic.seed), traffic.arrivals(), list[Request]()
    system = tokens(rng, 128)
    for number in range(traffic.number):
        is_first = number % 3 == 0
        own = tokens(rng, rng.randint(16, 64))
        at = next(arrivals) if is_first else 0.0
        requests.append(Request(system + own if is_first else own, 32, at, None if is_first else number - 1))
    return Workload(requests)


def streams(traffic: Traffic) -> Workload:
    """Four streams of 128 tokens, and prompts of 512 tokens while they run: every 12 tokens of a stream, or by rate."""
    rng, arrivals = Random(traffic.seed), traffic.arrivals()
    places = [next(arrivals) if traffic.rate else 12.0 * (i + 1) for i in range(traffic.number)]
    prompts = [Request(tokens(rng, 512), 8, at) for at in places]
    return streams_beside(
        prompts, number=4, num_tokens=128, clock="seconds" if traffic.rate else "tokens", seed=traffic.seed + 1
    )


def memory(traffic: Traffic) -> Workload:
    """Twelve conversations, the first ones more often than the last, in a KV memory of 1,280 tokens: too few for all.
    A turn arrives every eight steps, or by rate."""
    rng, arrivals, requests = Random(traffic.seed), traffic.arrivals(), list[Request]()
    system, last = tokens(rng, 128), dict[int, int]()
    ranks = range(12)
    for number in range(traffic.number):
        (rank,) = rng.choices(ranks, [1 / (rank + 1) for rank in ranks])
        own, after = tokens(rng, rng.randint(16, 48)), last.get(rank)
        at = 8.0 * number if traffic.rate is None else next(arrivals) if after is None else len(ranks) / traffic.rate
        requests.append(Request(own if rank in last else system + own, 16, at, after))
        last[rank] = number
    clock: Clock = "seconds" if traffic.rate else "steps"
    return Workload(requests, clock, {"cache": {"kv_tokens": 1280}})


def text(kind: str) -> Callable[[Traffic], Workload]:
    """Return the maker of questions of one kind, answered to their end, with n-gram drafts where the engine has any."""

    def make(traffic: Traffic) -> Workload:
        from benchmarks.texts import questions_of

        arrivals = traffic.arrivals()
        asked = [[{"role": "user", "content": text}] for text in questions_of(kind, traffic.number, traffic.seed)]
        requests = [Request(messages, 160, next(arrivals), ignore_eos=False) for messages in asked]
        return Workload(requests, settings={"speculative": {"method": "ngram"}})

    make.__doc__ = {
        "repeat": "Texts to be repeated: the answer stands in the prompt, so that n-gram drafts are right.",
        "recall": "Questions about a list of facts in the prompt: drafts are right in part.",
        "explain": "Questions whose answers stand in the weights alone: n-gram drafts are mostly wrong.",
    }[kind]
    return make


def pictures(traffic: Traffic) -> Workload:
    """Questions about pictures of 256 x 256 pixels, two questions for each picture. m6 only."""
    from benchmarks.texts import picture_message

    arrivals = traffic.arrivals()
    requests = [
        Request(picture_message(number // 2, ("Describe the picture.", "What is at the center?")[number % 2]), 24, at)
        for number, at in zip(range(traffic.number), arrivals, strict=False)
    ]
    return Workload(requests)


WORKLOADS: dict[str, tuple[int, Callable[[Traffic], Workload]]] = {
    "ragged": (32, ragged),
    "shared": (32, shared),
    "chat": (36, chat),
    "streams": (9, streams),
    "memory": (48, memory),
    "repeat": (12, text("repeat")),
    "recall": (12, text("recall")),
    "explain": (12, text("explain")),
    "pictures": (12, pictures),
}
"""Default number of requests, and the function that makes them."""


def named(name: str, *, number: int | None, rate: float | None, seed: int) -> Workload:
    """Return the workload of this name, or of this JSONL file. Raises `BenchmarkError` for neither."""
    if name.endswith(".jsonl"):
        return from_file(Path(name), number)
    if name not in WORKLOADS:
        raise BenchmarkError(f"there is no workload {name!r}: use {', '.join(WORKLOADS)}, or a file FILE.jsonl")
    default, make = WORKLOADS[name]
    return make(Traffic(number or default, rate, seed))


# --- from a file ------------------------------------------------------------------------------------------------------


KEYS = {"prompt", "messages", "max_tokens", "at", "after", "ignore_eos"}


def from_file(path: Path, number: int | None = None) -> Workload:
    """Read one request a line: `prompt` (text or token ids) or `messages`, `max_tokens`, and optionally `at` (seconds
    since the start), `after` (number of an earlier line, from 0) and `ignore_eos`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"the workload {path} cannot be read: {error}") from error
    requests = [_request(f"{path}, line {i + 1}", line, i) for i, line in enumerate(lines) if line.strip()][:number]
    if not requests:
        raise BenchmarkError(f"the workload {path} has no requests")
    return Workload(sorted(requests, key=lambda r: r.at) if all(r.after is None for r in requests) else requests)


def _request(place: str, line: str, index: int) -> Request:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict) or set(row) - KEYS or len({"prompt", "messages"} & set(row)) != 1:
        raise BenchmarkError(f"{place} must be an object with prompt or messages, and no keys but {', '.join(KEYS)}")
    prompt = row.pop("messages", None) or row.pop("prompt", None)
    request = Request(prompt, **{"max_tokens": 32, "ignore_eos": False} | row)
    is_number = isinstance(request.max_tokens, int) and isinstance(request.at, int | float)
    if not prompt or not isinstance(prompt, str | list) or not is_number or request.max_tokens < 1 or request.at < 0:
        raise BenchmarkError(f"{place}: the prompt is empty or no text, or max_tokens or at is no positive number")
    if request.after is not None and not (isinstance(request.after, int) and 0 <= request.after < index):
        raise BenchmarkError(f"{place}: after={request.after!r} is not the number of an earlier line")
    return request
