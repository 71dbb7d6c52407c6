"""Processes that read media for an engine, each one item at a time; all others wait here.

They start when the first item comes. A process that dies while it reads is replaced, and its item is read once more:
the system may have killed it for memory that others took. An item whose second process dies, too, fails. A process that
reads for minutes is killed, and counts as one that died; one whose item is canceled is killed at once. Nothing here
waits for an item, except `receive` for as long as its caller allows. New in this milestone. vLLM reads media in threads
of the process of its API server, apart from the engine core; SGLang: `io_executor` and `cpu_executor` of its
`BaseMultimodalProcessor`.
"""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import torch

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.dropped import when_dropped
from m6_multimodal_pd.errors import InvalidMediaError, PeerLostError, WireError
from m6_multimodal_pd.events import MediaProcessLost
from m6_multimodal_pd.multimodal import media_process
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.media_channel import FromProcess, ReadFrames, ReadPart, ReadPicture, receive, send
from m6_multimodal_pd.multimodal.media_settings import MediaSettings
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem

MAX_ATTEMPTS = 2
LONGEST_READ_S = 120.0
"""Seconds that a process may take for an item, besides `url_timeout_s`; then it counts as lost."""
REAP_TIMEOUT_S = 1.0
"""Seconds that the system may take to end a killed process."""


@dataclass(eq=False)
class MediaJob:
    """An item to be read."""

    message: ReadPart | ReadPicture | ReadFrames
    result: ProcessedItem | Exception | None = None
    """None until it is read."""
    num_attempts: int = 0
    """Processes that were lost while they had it."""

    @classmethod
    def of(cls, unread: dict[str, Any] | Picture | Frames, what: str) -> "MediaJob":
        """Return the job for a result of `MediaLoader.unread`; `what` names the item in errors."""
        if isinstance(unread, Picture):
            return cls(ReadPicture(what, unread))
        return cls(ReadFrames(what, unread) if isinstance(unread, Frames) else ReadPart(what, unread))


class MediaProcess:
    """One process, and the job that it has."""

    def __init__(self, settings: MediaSettings) -> None:
        """Start the process. Raises `OSError` if the system does not allow another one."""
        self.job: MediaJob | None = None
        self.deadline = 0.0
        """Time at which it must have read its job."""
        self.connection, theirs = socket.socketpair()
        # `-P`, and a process group of its own: as an engine of a group, see `disaggregation/runtime/processes.py`
        command = [sys.executable, "-P", str(Path(media_process.__file__)), str(theirs.fileno())]
        try:
            with theirs:
                send(self.connection, settings)  # first: it waits in the socket, and a failure leaves no process
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
        except BaseException:
            self.connection.close()
            raise

    def end(self) -> int | None:
        """Kill the process, which holds nothing that outlives it. Return its exit status, None if it does not end."""
        self.connection.close()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_TIMEOUT_S)
        return self.process.returncode


class MediaPool:
    """The processes of one engine, and the jobs that wait for them, first come first served."""

    def __init__(self, settings: MediaSettings, tracer: Tracer) -> None:
        self.settings, self.tracer = settings, tracer
        self.waiting: deque[MediaJob] = deque()
        self.processes: list[MediaProcess] = []
        self.longest_s = settings.config.url_timeout_s + LONGEST_READ_S
        self._has_results = False
        """Whether a job got its result since the last `receive`."""
        when_dropped(self, _end_all, self.processes)

    def submit(self, jobs: Iterable[MediaJob]) -> None:
        """Queue jobs; idle processes get the first ones at once."""
        self.waiting.extend(jobs)
        self._dispatch()

    def cancel(self, jobs: Collection[MediaJob]) -> None:
        """Remove jobs, and end the processes that have one. The next `receive` starts others if jobs wait for them."""
        for job in jobs:
            with suppress(ValueError):
                self.waiting.remove(job)
        for process in [each for each in self.processes if each.job in jobs]:
            self.processes.remove(process)
            process.end()

    def receive(self, timeout_s: float) -> bool:
        """Give results to their jobs; wait at most `timeout_s` seconds for one. Return whether a job got its result
        since the last call."""
        busy = {each.connection: each for each in self.processes if each.job is not None}
        for connection in wait(list(busy), 0.0 if self._has_results else timeout_s) if busy else ():
            process = busy[connection]  # type: ignore[index]
            try:
                message = receive(process.connection, FromProcess, mapped)
            except Exception as error:  # it has ended, or what it sends is no message
                self._lose(process, f"{type(error).__name__}: {error}")
                continue
            self._finish(process.job, message.result)
            process.job = None
        for process in busy.values():
            if process.job is not None and process in self.processes and time.monotonic() > process.deadline:
                self._lose(process, f"it has read for more than {self.longest_s:g} s")
        self._dispatch()
        has_results, self._has_results = self._has_results, False
        return has_results

    def close(self) -> None:
        """End all processes. May be called twice."""
        self.waiting.clear()
        _end_all(self.processes)

    def _dispatch(self) -> None:
        """Give waiting jobs to idle processes, and start processes until there are enough."""
        while self.waiting:
            process = next((each for each in self.processes if each.job is None), None)
            if process is None and len(self.processes) == self.settings.config.num_media_processes:
                return
            if process is not None and process.process.poll() is not None:
                self._lose(process, "it has ended while it had nothing to do")
                continue
            job = self.waiting.popleft()
            try:
                if process is None:
                    process = MediaProcess(self.settings)
                    self.processes.append(process)
                with suppress(ConnectionError):  # it has just ended: `receive` will find that
                    send(process.connection, job.message)
                process.job, process.deadline = job, time.monotonic() + self.longest_s
            except (WireError, OSError) as error:  # `OSError`: no process, memory or open file is left
                text = "no process can be started to read it" if process is None else "it cannot go to another process"
                kind = InvalidMediaError if isinstance(error, WireError) else PeerLostError
                self._finish(job, kind(f"{job.message.what}: {text}: {error}"))

    def _lose(self, process: MediaProcess, cause: str) -> None:
        """End and remove a lost process. Its job, if it has one, is the next one, unless it was the last attempt."""
        self.processes.remove(process)
        status, job = process.end(), process.job
        self.tracer.emit(MediaProcessLost, what=None if job is None else job.message.what, cause=cause, status=status)
        if job is None:
            return
        job.num_attempts += 1
        if job.num_attempts < MAX_ATTEMPTS:
            self.waiting.appendleft(job)
        else:
            text = f"{job.message.what}: the process that read it was lost, for the second time: {cause}"
            self._finish(job, PeerLostError(f"{text} (status {status})"))

    def _finish(self, job: MediaJob | None, result: ProcessedItem | Exception) -> None:
        assert job is not None
        job.result, self._has_results = result, True


def mapped(file: IO[bytes]) -> memoryview:
    """Map a file for this process alone; to write to it changes no other one.

    Images wait by the hundred, and Python's `mmap` keeps a descriptor open for each; torch's mapping does not.
    """
    name, num_bytes = f"/dev/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
    return torch.from_file(name, shared=False, size=num_bytes, dtype=torch.uint8).numpy().data


def _end_all(processes: list[MediaProcess]) -> None:
    while processes:
        processes.pop().end()
