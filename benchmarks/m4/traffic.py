"""The traffic of many tenants, drawn once by `generate`: `data/m4_tenants.csv` has the text `as_csv(generate())`.

Each tenant has a system prompt; few tenants have most of the users, and at half time others than before. Users chat: a
turn's prompt is the whole chat so far. Some tenants pay for priority. Now and then a job reads a pile of documents, one
request for each: they share a short instruction and no later request shares more, so they should be evicted first. One
row of the file is one request: tenant, chat, tokens of its prompt, tokens of its answer, priority. What the tokens are
follows from tenant, chat and position alone, so the file holds none.
"""

import hashlib
from dataclasses import astuple, dataclass, fields
from heapq import heappop, heappush
from math import log
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from m4_radix_cache.mem_cache.radix_key import RadixKey

FILE = Path(__file__).parent.parent / "data" / "m4_tenants.csv"
SEED = 7
NUM_TENANTS = 24
SYSTEM_PROMPTS = (128, 256, 512, 1024)  # tokens; one of them for each tenant
PAYING = 3  # every third tenant
READER = NUM_TENANTS  # the tenant that reads documents
INSTRUCTION = 96  # tokens of its system prompt
VOCABULARY = 150_000
Row = dict[str, Any]


@dataclass(frozen=True)
class TracedRequest:
    """One row of the file."""

    tenant: int
    chat: int
    prompt: int
    """Tokens, the system prompt and all turns before included."""
    output: int
    priority: int

    def token_ids(self) -> list[int]:
        """Return prompt and answer, `[prompt + output]`. The chat's next turn continues them."""
        system = min(system_prompt(self.tenant), self.prompt)
        own = self.prompt + self.output - system
        return [*_tokens(self.tenant, system), *_tokens(1000 + self.chat, own)]

    def key(self) -> RadixKey:
        """Return the same as a key of the cache."""
        return RadixKey(self.token_ids())


def system_prompt(tenant: int) -> int:
    """Return the length of a tenant's system prompt."""
    return INSTRUCTION if tenant == READER else SYSTEM_PROMPTS[tenant % len(SYSTEM_PROMPTS)]


def recorded() -> list[TracedRequest]:
    """Return the trace, in order of arrival."""
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    return [TracedRequest(*map(int, line.split(","))) for line in lines]


def describe(trace: list[TracedRequest]) -> Row:
    """Return the trace in numbers, for a results file."""
    prefixes = {(t.tenant, t.chat): t.prompt + t.output - system_prompt(t.tenant) for t in trace}  # the last turn's
    return {
        "file": FILE.name,
        "sha256": hashlib.sha256(FILE.read_bytes()).hexdigest(),
        "requests": len(trace),
        "chats": len(prefixes),
        "documents": sum(t.tenant == READER for t in trace),
        "prompt_tokens": sum(t.prompt for t in trace),
        "output_tokens": sum(t.output for t in trace),
        "unique_tokens": sum(prefixes.values()) + sum(map(system_prompt, range(NUM_TENANTS + 1))),
        "longest": max(t.prompt + t.output for t in trace),
    }


def generate(
    *, num_chats: int = 800, seed: int = SEED, mean_pause: float = 40.0, documents_every: int = 100
) -> list[TracedRequest]:
    """Draw a trace. A chat begins at each tick; between its turns there are `mean_pause` of them, in the mean."""
    rng = Random(seed)
    coming: list[tuple[float, int, TracedRequest, int]] = []  # when, tie-break, what, turns that follow
    for chat in range(num_chats):
        tenant = _popular_tenant(rng, is_second_half=2 * chat >= num_chats)
        prompt = system_prompt(tenant) + _between(rng, 16, 200)
        priority = int(tenant % PAYING == 0)
        first = TracedRequest(tenant, chat, prompt, _between(rng, 32, 256), priority)
        heappush(coming, (float(chat), chat, first, _num_more_turns(rng)))
    for start in range(documents_every // 2, num_chats, documents_every):
        for number in range(25):
            chat = num_chats + start * 100 + number
            document = TracedRequest(READER, chat, INSTRUCTION + _between(rng, 800, 2000), 16, 0)
            heappush(coming, (start + 0.5 * number, chat, document, 0))
    trace = []
    while coming:
        when, number, request, left = heappop(coming)
        trace.append(request)
        if left:
            prompt = request.prompt + request.output + _between(rng, 16, 200)
            turn = TracedRequest(request.tenant, request.chat, prompt, _between(rng, 32, 256), request.priority)
            pause = -mean_pause * log(1 - rng.random())
            heappush(coming, (when + pause, number, turn, left - 1))
    return trace


def _popular_tenant(rng: Random, *, is_second_half: bool) -> int:
    """Draw a tenant: the n-th has 1/n of the first one's users; in the second half the ranks are turned by half."""
    (rank,) = rng.choices(range(NUM_TENANTS), [1 / (rank + 1) for rank in range(NUM_TENANTS)])
    return (rank + NUM_TENANTS // 2 * is_second_half) % NUM_TENANTS


def _num_more_turns(rng: Random) -> int:
    """Draw the number of turns after the first: two on average, seven at most."""
    more = 0
    while more < 7 and rng.random() < 2 / 3:
        more += 1
    return more


def _between(rng: Random, low: int, high: int) -> int:
    """Draw a whole number, both ends included."""
    return low + int(rng.random() * (high - low + 1))


def _tokens(stream: int, count: int) -> list[int]:
    """Return the first tokens of an endless stream: splitmix64 of its number and their position."""
    z: npt.NDArray[np.uint64] = np.arange(count, dtype=np.uint64) + np.uint64(stream << 32)
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(VOCABULARY)).tolist()


def as_csv(trace: list[TracedRequest]) -> str:
    """Return the text of the file."""
    columns = [field.name for field in fields(TracedRequest)]
    return "".join(",".join(map(str, row)) + "\n" for row in [columns, *map(astuple, trace)])
