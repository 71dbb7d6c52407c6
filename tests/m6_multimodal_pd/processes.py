"""Helpers of the tests with engines in processes: groups of them, engines by hand, and what is left of them."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from m6_multimodal_pd import LLMEngine, ModelConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from tests.m6_multimodal_pd import silent_engine
from tests.m6_multimodal_pd.engines import setting

LIMIT_S = 60.0
"""Nothing here may take longer, whatever is killed."""
PROGRAMS = (b"m6_multimodal_pd.disaggregation.runtime.child", b"m6_multimodal_pd.pd")
"""Of an engine of a group, and of one by hand."""


def configs(model: Path) -> dict[str, Any]:
    """Of every engine here."""
    return setting(8, 16) | {"model_config": ModelConfig(model=model, device="cpu", dtype="float32")}


def group_of(model: Path, **settings: Any) -> Any:
    """Engines that are processes."""
    return LLMEngine(**configs(model), disaggregation_config=DisaggregationConfig(**settings))


def links_of(engine: Any) -> Any:
    return engine.engine_core.router.links


def pid_of(engine: Any, role: str) -> int:
    """The process of the one engine of this role."""
    (child,) = [child for child in links_of(engine).children.values() if child.order.role == role]
    return int(child.process.pid)


def segments(owner: str) -> list[str]:
    """Names in shared memory that begin with this owner's."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"stepwise-{owner}")]


def eventually(holds: Callable[[], Any], timeout_s: float = LIMIT_S) -> bool:
    """Look until it holds, so long at most."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(found)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def own_engines() -> list[int]:
    """Processes of engines that this process has started, those by hand included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and any(program in command for program in PROGRAMS):
            found.append(int(folder.name))
    return found


def has_both(engine: Any) -> bool:
    """Whether a prefill and a decode engine are members of the group, perhaps after a while."""
    router = engine.engine_core.router
    return eventually(lambda: router.listen(0.05) or len(router.members) == 2)


def left_of(engine: Any) -> dict[str, int]:
    """What a group without requests still has of them, once its caches are flushed: zeros, unless there is a leak."""
    router, links = engine.engine_core.router, links_of(engine)
    stats = engine.engine_core.call_all("stats").values()
    return {
        "tokens": sum(own["max_total_tokens"] - own["available_size"] for own in stats),
        "requests": sum(own["num_running"] + own["num_waiting"] for own in stats),
        "rooms": len(router.attempts) + sum(len(member.rooms) for member in router.members.values()),
        "segments": len(segments(links._group)),
        "processes": len(set(own_engines()) - {child.process.pid for child in links.children.values()}),
    }


class Callers:
    """Requests of several callers, and every output that each of them got."""

    def __init__(self, engine: Any, asked: Sequence[tuple[Any, Any]], **options: Any) -> None:
        self.engine = engine
        self.told: dict[str, list[Any]] = {}
        for prompt, params in asked:
            self.told[engine.add_request(engine.chat_prompt(prompt), params, **options)] = []

    def step(self) -> None:
        for rid, output in self.engine.step().items():
            self.told[rid].append(output)

    def step_until(self, holds: Callable[[], bool]) -> None:
        """Fails if it never does."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, "nobody waits so long"
            self.step()

    def num_tokens(self) -> int:
        """Told so far, to all of them."""
        last = [told[-1] for told in self.told.values() if told]
        return sum(len(one.token_ids) for output in last for one in output.outputs)

    def num_repeated(self) -> int:
        """Outputs that follow a final one, or do not go on where the one before has ended."""
        pairs = [pair for told in self.told.values() for pair in pairwise(told)]
        return sum(before.finished or not all(map(goes_on, before.outputs, after.outputs)) for before, after in pairs)

    def answers(self) -> dict[str, Any]:
        """The last word to each, by its number; nothing was said twice, or taken back."""
        self.step_until(lambda: not self.engine.has_unfinished_requests())
        last = {str(number): told[-1] for number, told in enumerate(self.told.values())}
        assert all(output.finished for output in last.values()) and not self.num_repeated()
        return last


def goes_on(before: Any, after: Any) -> bool:
    """Whether an answer's tokens and text begin with those of an earlier output."""
    return after.token_ids[: len(before.token_ids)] == before.token_ids and after.text.startswith(before.text)


def open_files() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_sockets() -> int:
    """Open descriptors of this process that are sockets, or ZeroMQ's own."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(descriptor).startswith(("socket:", "anon_inode:[event"))
        except OSError:  # the directory's own, closed since
            continue
    return found


@contextmanager
def by_hand(
    role: str, address: str, keys: Path, *more: str, sizes: Sequence[str] = ("--max-total-tokens", "1024")
) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own, as somebody would start it."""
    command = [sys.executable, "-m", "m6_multimodal_pd.pd", role, "--join", address, "--keys", str(keys), *more]
    process = subprocess.Popen(
        [*command, *sizes, "--device", "cpu", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_address() -> str:
    """Where nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def in_a_thread(work: Callable[[], None], timeout_s: float) -> None:
    """Do it, so long at most; what it raises is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), f"it takes longer than {timeout_s:g} s"
    for error in errors:
        raise error


class Loop:
    """What refers to itself, and so ends when the garbage collector finds it."""

    def __init__(self, held: Any) -> None:
        self.held, self.own = held, self


@contextmanager
def process_of(order: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A silent engine in a process of its own."""
    with subprocess.Popen([sys.executable, silent_engine.__file__], stdin=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()
