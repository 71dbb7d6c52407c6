"""Memory that two processes of one host see: a file in /dev/shm, mapped by both, and without a name soon after.

A process that is killed cleans nothing up, so a segment has a name only from the offer until both sides have mapped it.
From then on it is the kernel's to free, when the last of the two unmaps it or dies. What dies inside that window leaves
a name that begins with its owner's, and whoever started the owner removes it (`remove_leftovers`). What an engine that
was started by hand leaves is removed by the next such engine on this host (`remove_abandoned`). Python's
`multiprocessing.shared_memory` keeps the name to the end, and its resource tracker unlinks what others still use. New
in this milestone. vLLM has such memory for messages between its workers (`distributed/device_communicators/
shm_broadcast.py`), SGLang for pictures; both move KV through the network card, on one host as well.
"""

import mmap
import os
import re
import secrets
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError, shown
from m6_multimodal_pd.errors import TransferError

OWNER = re.compile(r"[A-Za-z0-9]{1,32}")
SEGMENT = re.compile(rf"stepwise-({OWNER.pattern})-[0-9a-f]{{32}}")
BY_HAND = re.compile(r"hand([0-9a-f]+)p([0-9]+)x[0-9a-f]{6}")
"""The owner's name of an engine that was started by hand: its namespace of processes, and its process there."""


class SharedMemorySegments:
    """The `Segments` of engines in two processes; each process has its own, and no two have the same owner."""

    def __init__(self, owner: str) -> None:
        """`owner`: up to 32 letters and digits, in the name of every segment that is created here."""
        check_owner(owner)
        self.owner = owner

    def create(self, num_bytes: int) -> tuple[str, Tensor]:
        """New memory, taken from the machine at once, so that no later write can find it missing."""
        name = f"stepwise-{self.owner}-{secrets.token_hex(16)}"
        path = segment_directory() / name
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                _reserve(descriptor, num_bytes)
                return name, _mapped(descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except (OSError, OverflowError) as error:
            raise TransferError(f"{num_bytes:,} bytes of shared memory cannot be had in {path}: {error}") from error

    def open(self, name: str, num_bytes: int) -> Tensor:
        """The memory for reading: whoever writes to it here is stopped by the kernel."""
        if not SEGMENT.fullmatch(name):
            raise TransferError(f"{shown(name)} is not the name of a segment")
        path = segment_directory() / name
        try:
            # not blocking: a pipe of that name must not keep us waiting
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _check_file(path, os.fstat(descriptor), num_bytes)
                return _mapped(descriptor, num_bytes, mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TransferError(f"segment {path} cannot be opened: {error}") from error

    def unlink(self, name: str) -> None:
        """Take the name away; who has mapped the memory keeps it."""
        (segment_directory() / name).unlink(missing_ok=True)


def segment_directory() -> Path:
    """Where segments have their names: memory if the machine has such a directory, else temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def leftovers(owner: str) -> list[str]:
    """Names of segments that this owner has created and not unlinked; all of them are leftovers once it is dead."""
    check_owner(owner)
    names = (SEGMENT.fullmatch(name) for name in os.listdir(segment_directory()))
    return sorted(name[0] for name in names if name and name[1] == owner)


def remove_leftovers(owner: str) -> list[str]:
    """Unlink them; returns their names. Only for an owner that is dead."""
    names = leftovers(owner)
    for name in names:
        (segment_directory() / name).unlink(missing_ok=True)
    return names


def owner_by_hand() -> str:
    """Return a new owner's name for this process, from which others on this host see whether it is dead."""
    return f"hand{_process_namespace():x}p{os.getpid()}x{secrets.token_hex(3)}"


def remove_abandoned() -> list[str]:
    """Unlink the segments of dead engines that were started by hand; return their names.

    A process of another namespace (another container) cannot be seen from here, so what is its own stays.
    """
    names = []
    for path in segment_directory().glob("stepwise-hand*"):
        segment = SEGMENT.fullmatch(path.name)
        owner = BY_HAND.fullmatch(segment[1]) if segment else None
        if owner and int(owner[1], 16) == _process_namespace() and not _is_alive(int(owner[2])):
            with suppress(OSError):  # another user's
                path.unlink()
                names.append(path.name)
    return names


def _process_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without namespaces
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def check_owner(owner: object) -> None:
    """Raise `ConfigError` for a name that cannot be part of a file's."""
    if not isinstance(owner, str) or not OWNER.fullmatch(owner):
        raise ConfigError(f"owner={shown(owner)} must be 1 to 32 letters and digits")


def _check_file(path: Path, status: os.stat_result, num_bytes: int) -> None:
    """Raise `TransferError` unless this is a plain file of ours and nobody else's, of exactly that size."""
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"segment {path} is not a file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise TransferError(f"segment {path} is open to other users")
    if status.st_size != num_bytes:  # a smaller one would kill whoever reads past its end
        raise TransferError(f"segment {path} has {status.st_size:,} bytes, not {num_bytes:,}")


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:  # macOS: the memory is taken when it is written
        os.ftruncate(descriptor, num_bytes)


def _mapped(descriptor: int, num_bytes: int, protection: int) -> Tensor:
    """The file as uint8 `[num_bytes]`, mapped until the last tensor of it is gone: there is nothing to close."""
    memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, protection)
    with warnings.catch_warnings():  # torch has no tensors for reading only, and says so
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
