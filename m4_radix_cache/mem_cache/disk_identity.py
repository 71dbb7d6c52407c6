"""Identity of a model: a digest of everything that the numbers in its KV depend on, beside the tokens.

KV on a disk outlives the process, so the name of a model says nothing: another checkpoint may be at the same path
tomorrow. The files are hashed instead. That takes seconds, so the digest of each file is kept in the directory of the
disk tier, with the state of the file that had it. A model is loaded before its files are hashed, so a file that was
replaced in between is an error. New in this milestone.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from m1_single_request.errors import ModelLoadError, shown_path
from m4_radix_cache.mem_cache.disk_files import Damage, private_directory, read_file, reason_of, write_file

CACHE_FILE = "model_files.v1"
"""Digests of model files: a checksum in hex, a line feed, and JSON."""
MAX_CACHE_BYTES = 2**24
FileState = list[int]
"""Numbers that differ after a change of a file; the last two are times in nanoseconds."""
SETTLED_NS = 2 * 10**9
"""A file that was changed less than this long ago may change again without another time of change: the clock of a file
system is coarse. Its digest is not kept."""


def states_in(name: str) -> dict[str, FileState] | None:
    """Return the states of all files that a model in a directory can be loaded from, by path. None for a hub id: a
    revision there never changes."""
    if not os.path.isdir(name):
        return None
    files = [file for file in Path(name).iterdir() if file.suffix in (".json", ".safetensors") and file.is_file()]
    return {os.path.abspath(file): _state_of(file.stat()) for file in files}


def model_identity(
    files: Iterable[Path],
    settings: Mapping[str, Any],
    directory: str | Path,
    loaded_from: Mapping[str, FileState] | None = None,
) -> str:
    """Return a digest of a model, in hex.

    `files`: config.json and the files with weights; weights drawn from a seed have none. `settings`: JSON values on
    which the KV depends as well: the precision, the quantization of the weights, and for weights from a seed this seed,
    the type of the device and torch's version. `directory`: of the disk tier, where digests of files are kept.
    `loaded_from`: `states_in` before the model was loaded.

    Raises `ModelLoadError` if a file cannot be read, is being written or was changed since then, and `ConfigError` for
    an unusable directory.
    """
    directory = private_directory(directory)
    known = _read_cache(directory)
    found, hashed = [], {}
    for file in sorted(files):
        path = os.path.abspath(file)
        try:
            with open(path, "rb") as stream:
                state, now = _state_of(os.fstat(stream.fileno())), time.time_ns()
                if loaded_from is not None and loaded_from.get(path) != state:
                    raise ModelLoadError(f"{shown_path(path)} was changed while the model was loaded: start again")
                entry = known.get(path)
                digest = entry[1] if entry and entry[0] == state else hashlib.file_digest(stream, "sha256").hexdigest()
                if _state_of(os.fstat(stream.fileno())) != state:
                    raise ModelLoadError(f"{shown_path(path)} was changed while it was read: start again")
        except OSError as error:
            raise ModelLoadError(f"{shown_path(path)} cannot be read ({reason_of(error)})") from error
        found.append([file.name, digest])
        if entry != [state, digest] and max(state[-2:]) < now - SETTLED_NS:
            hashed[path] = [state, digest]
    if hashed:
        _write_cache(directory, {**known, **hashed})
    return hashlib.sha256(json.dumps([found, settings], sort_keys=True).encode()).hexdigest()


def _state_of(status: os.stat_result) -> FileState:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_cache(directory: str) -> dict[str, Any]:
    """Return `[state, digest]` by path; nothing if the file is missing or damaged."""
    try:
        content = read_file(os.path.join(directory, CACHE_FILE), MAX_CACHE_BYTES)
    except (OSError, Damage):
        return {}
    checksum, _, text = content.partition(b"\n")
    return json.loads(text) if checksum == _checksum(text) else {}


def _write_cache(directory: str, entries: dict[str, Any]) -> None:
    text = json.dumps({path: entry for path, entry in entries.items() if os.path.exists(path)}).encode()
    with suppress(OSError):  # then the next start hashes again
        write_file(directory, CACHE_FILE, (_checksum(text), b"\n", text))


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
