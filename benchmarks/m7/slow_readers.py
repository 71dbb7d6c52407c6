"""One stream beside a hundred readers that hardly read.

Two servers take turns: one has no other client, and one holds streams of which almost nothing is read. The engine has
computed these answers before, so that the front is measured: a batch of a hundred requests would delay a stream
whatever their readers do. Some of the answers are too large for the buffers of the system: the server holds their rest,
and writes whenever their readers have read.
"""

import re
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from random import Random

from benchmarks import BenchmarkError, Row
from benchmarks.lesson import SEED
from benchmarks.m7.measures import CLIENT, DUMMY, SERVER, Process, gaps_of, in_turns_of, prompts
from benchmarks.machine import LoadMeter
from benchmarks.timing import quantile

NUM_TOKENS = 16
"""Tokens of a slow reader's answer."""


def slow_readers(model: Path, num_tokens: int, rounds: int, *, number: int, large: tuple[int, int]) -> Row:
    """Measure the gaps of one stream in turns. `number`: of slow readers; `large`: number of answers that fill all
    buffers, and tokens of each of their eight outputs, with 20 log-probabilities of each token."""
    random = Random(SEED)
    with ExitStack() as stack, LoadMeter() as meter:
        start = lambda *command: stack.enter_context(Process(*command))  # noqa: E731
        servers = [start(*SERVER, "--model", str(model), *DUMMY) for _ in range(2)]
        alone, beside = (server.line().split()[-1] for server in servers)
        slow = start(*CLIENT, "slow", beside)
        slow.answer([prompts(random, number), NUM_TOKENS, *large])
        wait_until_idle(beside)
        clients = {"alone": start(*CLIENT, "raw", alone), "beside": start(*CLIENT, "raw", beside)}
        found = in_turns_of(clients, random, num_tokens, rounds, number=1)
        holds = slow.answer(None)["holds"]
    gaps = {name: [gap for run in runs for gap in gaps_of(run)] for name, runs in found.items()}
    return {
        "num_tokens": num_tokens,
        "readers": number,
        "large": large[0],
        "complete": holds and all(run["num_tokens"] == num_tokens for runs in found.values() for run in runs),
        "p50": {name: quantile(own, 0.5) for name, own in gaps.items()},
        "p99": {name: quantile(own, 0.99) for name, own in gaps.items()},
        "load": meter.report(),
    }


def wait_until_idle(url: str, timeout_s: float = 600.0) -> None:
    """Wait until the engine of a server has no request. Raises `BenchmarkError` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(1.0)  # the first time, the requests are on their way
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=timeout_s) as answer:
            page = answer.read().decode()
        numbers = re.findall(r"^sglang:num_(?:running|queue)_reqs\{.*\} (\S+)$", page, re.MULTILINE)
        if not any(map(float, numbers)):
            return
    raise BenchmarkError(f"the engine of {url} has requests after {timeout_s:.0f} s")
