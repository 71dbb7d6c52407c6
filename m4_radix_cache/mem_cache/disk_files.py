"""Files of the disk tier: written completely or not at all, and read without trust in what has their name.

Several processes use the directory, and each may be killed at any moment. So a file is written under a temporary name
and renamed when it is complete. While it is written it is locked. The system releases the lock when the process ends,
and an unlocked temporary file is therefore one that nobody completes. New in this milestone. Compare SGLang:
`HiCacheFile` in `mem_cache/hicache_storage.py`.
"""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from m1_single_request.errors import ConfigError, shown_path

PREFIX, SUFFIX = ".kv-", ".tmp"
"""Begin and end of a temporary name."""
DAMAGE = (errno.ELOOP, errno.ENXIO, errno.EIO)
"""Errors that concern this file alone: it is a symbolic link or a socket, or its blocks cannot be read."""


class Damage(Exception):
    """The file with this name is not the one that was written. The message is the reason."""


def private_directory(path: str | Path) -> str:
    """Return the absolute path of a directory for the files; a missing one is created for its owner alone.

    Raises `ConfigError` if it cannot be used, or if other users can write to it: they could replace a page by another
    one. They may be able to list it: a file is readable by its owner only, and its name is a digest.
    """
    path = os.path.abspath(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
        os.listdir(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"disk_path={shown_path(path)} cannot be used ({reason_of(error)}): give a directory in which this user "
            f"can create files"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"disk_path={shown_path(path)} can be written by other users, who could replace KV: remove their "
            f"permission (chmod go-w), or give a new directory below it"
        )
    return path


def read_file(path: str, longest: int) -> bytes:
    """Return the first `longest` bytes of a regular file.

    Raises `FileNotFoundError`; `Damage` if something else has this name, or the disk cannot read it; `OSError`. It
    never blocks and follows no link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Damage("it is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(longest)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in DAMAGE:
            raise Damage(reason_of(error)) from error
        raise


def write_file(directory: str, name: str, chunks: Iterable[Any]) -> None:
    """Write buffers to a file. It has its name only when it is complete; a file of this name is replaced.

    Raises `OSError`; then nothing is left. The file is not synchronised with the disk: after a power failure it may be
    damaged, which its checksum shows.
    """
    file, temporary = _create(directory)
    try:
        with file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.replace(temporary, os.path.join(directory, name))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def is_temporary(name: str) -> bool:
    """Return whether this is the name of a file that a process writes or wrote."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def remove_abandoned(path: str) -> None:
    """Remove a temporary file whose process was killed: nobody holds its lock."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def reason_of(error: Exception) -> str:
    """Return the text of an error of the system, without path and number."""
    return getattr(error, "strerror", None) or str(error)


def _create(directory: str) -> tuple[BinaryIO, str]:
    """Create a temporary file, readable by its owner only, and lock it."""
    while True:
        descriptor, path = tempfile.mkstemp(SUFFIX, PREFIX, directory)
        file = os.fdopen(descriptor, "wb")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return file, path
        except BlockingIOError:  # another process took it for abandoned, before it was locked
            pass
        except OSError:
            file.close()
            os.unlink(path)
            raise
        file.close()
