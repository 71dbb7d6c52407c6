"""Memory that two processes of one host share: a file in /dev/shm, mapped by both, and without a name soon after.

A process that is killed removes nothing, so a segment has a name only from the offer until both sides have mapped it.
From then on the kernel frees it when the last of the two unmaps it or dies. A process that dies inside that window
leaves a name that begins with its owner's, and the router that started the process removes it (`remove_leftovers`). A
name of an engine that was started by hand is removed by the next such engine on this host (`remove_abandoned`).
Python's `multiprocessing.shared_memory` keeps the name to the end, and its resource tracker unlinks segments that
others still use. New in this milestone. vLLM has such memory for messages between its workers
(`distributed/device_communicators/shm_broadcast.py`), SGLang for pictures; both move KV through the network card, on
one host as well.
"""

import mmap
import os
import re
import secrets
import stat
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from m1_single_request.errors import shown
from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments
from m6_multimodal_pd.errors import TransferError

SEGMENT = re.compile(r"stepwise-([A-Za-z0-9]{1,32})-[0-9a-f]{32}")
"""The name of a segment, with that of its owner."""
BY_HAND = re.compile(r"hand([0-9a-f]+)p([0-9]+)x[0-9a-f]{6}")
"""The owner's name of an engine that was started by hand: its namespace of processes, and its process there."""


class SharedMemorySegments:
    """The `Segments` of engines in two processes; each process has its own, and no two have the same owner."""

    def __init__(self, owner: str) -> None:
        """`owner`: up to 32 letters and digits, in the name of every segment that is created here."""
        self.owner = owner

    def create(self, num_bytes: int) -> tuple[str, Tensor]:
        """Return new memory and its name. All of it is reserved at once, so that no later write can find it missing."""
        name = f"stepwise-{self.owner}-{secrets.token_hex(16)}"
        path = segment_directory() / name
        try:
            with open(path, "x+b", opener=partial(os.open, mode=0o600)) as file:
                try:
                    _reserve(file.fileno(), num_bytes)
                    return name, _mapped(file.fileno(), num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
                except BaseException:
                    path.unlink()
                    raise
        except (OSError, OverflowError) as error:
            raise TransferError(f"{num_bytes:,} bytes of shared memory cannot be had in {path}: {error}") from error

    def open(self, name: str, num_bytes: int) -> Tensor:
        """Return the memory for reading: the kernel ends a process that writes to it here."""
        if not SEGMENT.fullmatch(name):
            raise TransferError(f"{shown(name)} is not the name of a segment")
        path = segment_directory() / name
        try:
            # O_NONBLOCK: to open a pipe of that name does not wait
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _check_file(path, os.fstat(descriptor), num_bytes)
                return _mapped(descriptor, num_bytes, mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TransferError(f"segment {path} cannot be opened: {error}") from error

    def unlink(self, name: str) -> None:
        """Remove the name; a process that has mapped the memory keeps it."""
        (segment_directory() / name).unlink(missing_ok=True)

    def on_device(self, device: torch.device) -> DeviceSegments | None:
        """Return the segments in the memory of a GPU; None for a CPU."""
        return DeviceSegments(device) if device.type == "cuda" else None


def segment_directory() -> Path:
    """Return the directory of segments: one in memory if the machine has it, else that of temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def remove_leftovers(owner: str) -> list[str]:
    """Unlink the segments of an owner that is dead; return their names."""
    return _remove_segments(lambda name: name == owner)


def remove_abandoned() -> list[str]:
    """Unlink the segments of dead engines that were started by hand; return their names."""
    return _remove_segments(_is_abandoned)


def owner_by_hand() -> str:
    """Return a new owner's name for this process, by which others on this host find out whether it is dead."""
    return f"hand{_process_namespace():x}p{os.getpid()}x{secrets.token_hex(3)}"


def _remove_segments(is_dead: Callable[[str], bool]) -> list[str]:
    removed = []
    for name in sorted(os.listdir(segment_directory())):
        segment = SEGMENT.fullmatch(name)
        if segment is not None and is_dead(segment[1]):
            with suppress(OSError):  # another user's, or removed since
                (segment_directory() / name).unlink()
                removed.append(name)
    return removed


def _is_abandoned(owner: str) -> bool:
    """Return whether `owner` is an engine that was started by hand and is dead. The state of a process of another
    namespace (another container) is unknown here, so its segments stay."""
    engine = BY_HAND.fullmatch(owner)
    return engine is not None and int(engine[1], 16) == _process_namespace() and not _is_alive(int(engine[2]))


def _process_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without namespaces
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: another user's
        return not isinstance(error, ProcessLookupError)
    return True


def _check_file(path: Path, status: os.stat_result, num_bytes: int) -> None:
    """Raise `TransferError` unless this is a plain file that only this user can open, of exactly that size."""
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"segment {path} is not a file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise TransferError(f"segment {path} is open to other users")
    if status.st_size != num_bytes:  # reading past the end of a smaller one kills the process
        raise TransferError(f"segment {path} has {status.st_size:,} bytes, not {num_bytes:,}")


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:  # macOS: the memory is taken when it is written
        os.ftruncate(descriptor, num_bytes)


def _mapped(descriptor: int, num_bytes: int, protection: int) -> Tensor:
    """Return the file as uint8 `[num_bytes]`, mapped until its last tensor is gone: there is nothing to close."""
    memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, protection)
    with warnings.catch_warnings():  # torch has no tensors for reading only, and warns
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
