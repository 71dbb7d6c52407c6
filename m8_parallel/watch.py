"""Heartbeats of the ranks: each increments a counter in the store, from a thread of its own.

If a rank has died, the next collective of the others fails at once. A rank that is stopped, or whose host is gone, is
found by its heartbeat: the counter does not change any more. torchrun ends all ranks as soon as one has died, by
SIGTERM, after a tenth of a second; a survivor has its error out first. It would wait half a minute for a stopped rank,
so the survivors on the same host end it. A host that waits for its device in C hears of nothing, so this thread ends
what the device waits for (`Watch.guard`). vLLM and SGLang watch their own child processes; here there are none.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from m8_parallel.errors import RankLostError

BEAT_S = 0.5
"""Time between two signs of life."""
LOST_BEATS = 14
"""Number of own heartbeats without one of another rank after which that is lost. A clock would count the time in which
this process was stopped, too, and perhaps all were."""


class Watch:
    """Signs of life of this rank, and the look at those of the others."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        """`store`: of this thread alone, since a store is used by one thread at a time."""
        self.rank, self.others, self._store = rank, [other for other in range(size) if other != rank], store
        self.lost: str | None = None
        """Why the job cannot go on; None while all ranks live."""
        self.is_raised = False
        """Whether that was raised, so that the signal which ends all ranks must not raise it once more."""
        self.closed: list[int] = []
        """Ranks that have closed their `Watch`, after an error too; their heartbeats are not checked any more."""
        self._closed = threading.Event()
        self._guarded: tuple[str, Callable[[], object]] | None = None
        self._ended = ""  # the note of the last group that this thread has ended
        self.deadline = math.inf
        """Monotonic seconds at which the part of a step that runs is taken for hanging, and this rank for lost."""
        self._seen: dict[int, tuple[bytes, int]] = {}  # the last heartbeat of a rank, and how often it was the same
        self._places: dict[int, tuple[str, int]] = {}  # host and process, by rank
        store.set(f"beat {rank}", "0")
        store.set(f"place {rank}", f"{_host()} {os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_terminate)

    def guard(self, note: str, end: Callable[[], object]) -> None:
        """Call `end` once as soon as a rank is lost, or leaves a group, which sets the key `note`; until `release`.

        The host may wait in C then, for a device that waits for that rank: it reads no notes, and handles no signal.
        `end` runs on a thread of its own, and may be called when the group has just been left.
        """
        self._guarded = note, end

    def release(self) -> None:
        """Forget the group of `guard`, before this rank leaves it itself."""
        self._guarded = None

    def close(self) -> None:
        """Stop the heartbeat, and set the key that keeps the other ranks from taking this rank for lost."""
        self._closed.set()
        self._thread.join()
        with suppress(dist.DistError):
            self._store.set(f"closed {self.rank}", "")
        if self._before is not None and self.lost is None:  # else the signal may come while the error goes out
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(BEAT_S):
            number += 1
            try:
                self._store.set(f"beat {self.rank}", str(number))
                for other in self.others:
                    self._look_at(other)
                self._look_at_group()
            except dist.DistError as error:
                self.lost = self.lost or f"rank {self.rank} cannot reach the store of the job: {error}"
                self._look_at_group()
                return

    def _look_at_group(self) -> None:
        if time.monotonic() > self.deadline:
            self.lost = self.lost or f"rank {self.rank} has waited too long in a step"
        note, end = self._guarded or ("", None)
        if end is not None and note != self._ended and (self.lost or self._store.check([note])):
            self._ended = note
            threading.Thread(target=end, name="end of a group", daemon=True).start()

    def _look_at(self, other: int) -> None:
        if other not in self._places and self._store.check([f"place {other}"]):
            host, pid = self._store.get(f"place {other}").decode().split()
            self._places[other] = host, int(pid)
        if other in self.closed:
            return
        if self._store.check([f"closed {other}"]):
            self.closed.append(other)
            return
        if other not in self._places:  # it has not begun
            return
        beat = self._store.get(f"beat {other}")
        before, missed = self._seen.get(other, (b"", 0))
        missed = missed + 1 if beat == before else 0
        self._seen[other] = beat, missed
        if missed == LOST_BEATS:  # once: later its number may be that of another process
            self.lost = self.lost or f"rank {other} gives no sign of life"
            self._end(*self._places[other])

    @staticmethod
    def _end(host: str, pid: int) -> None:
        """End a silent rank if it is on this host; then torchrun ends the job."""
        if host == _host():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _on_terminate(self, number: int, frame: object) -> None:
        """Raise the error that this is the end of the job, once; a second signal ends the process."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.lost = self.lost or "torchrun ends this rank: another one has ended"
        if not self.is_raised:
            self.is_raised = True
            raise RankLostError(self.lost)


def _host() -> str:
    """Return a name of what the number of a process belongs to: this host since its start, or a container of it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}-{Path('/proc/self/ns/pid').readlink().name}"
    return socket.gethostname()
