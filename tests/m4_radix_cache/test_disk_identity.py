"""The identity of a model: it changes with every byte, and the files are read once."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from m1_single_request.errors import ConfigError, ModelLoadError
from m4_radix_cache.mem_cache import disk_identity
from m4_radix_cache.mem_cache.disk_identity import CACHE_FILE, model_identity

SETTINGS = {"dtype": "float32", "quantization": None}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model whose files seem to be there for some time."""
    monkeypatch.setattr(disk_identity, "SETTLED_NS", -(10**9))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(1000))
    return sorted(model.iterdir())


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read, as they are."""
    names, digest = [], hashlib.file_digest

    def file_digest(file: Any, name: Any) -> Any:
        names.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    return names


def identity(files: list[Path], **settings: Any) -> str:
    return model_identity(files, {**SETTINGS, **settings}, files[0].parents[1] / "kv")


def test_files_are_read_once(files: list[Path], hashed: list[str]) -> None:
    first = identity(files)
    assert hashed == ["config.json", "model.safetensors"]
    assert identity(files) == first == identity(files[::-1]) and len(hashed) == 2


def test_only_a_file_that_was_changed_is_read_again(files: list[Path], hashed: list[str]) -> None:
    first = identity(files)
    files[0].write_text("{} ")
    assert identity(files) != first and hashed[2:] == ["config.json"]
    files[0].write_text("{}")
    assert identity(files) == first and hashed[3:] == ["config.json"]


def test_a_change_that_keeps_size_and_time_is_noticed(files: list[Path]) -> None:
    """As after `cp -p`: the time at which the system has noted a change cannot be set."""
    first, before = identity(files), files[1].stat()
    files[1].write_bytes(bytes(999) + b"1")
    while (now := files[1].stat()).st_ctime_ns == before.st_ctime_ns or now.st_mtime_ns != before.st_mtime_ns:
        os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # until the clock has moved on
    assert identity(files) != first


def test_a_model_that_was_moved_is_the_same(files: list[Path], tmp_path: Path) -> None:
    first = identity(files)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "model").symlink_to("elsewhere")
    assert identity([tmp_path / "elsewhere" / file.name for file in files]) == first == identity(files)


def test_settings_and_the_list_of_files_count(files: list[Path]) -> None:
    dummy = [identity(files[:1], load_format="dummy", seed=seed) for seed in (0, 1)]
    all_identities = [identity(files), identity(files, quantization="int8"), identity(files[:1]), *dummy]
    assert len({*all_identities}) == 5


def test_a_file_that_was_just_written_is_read_again(
    files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file system is coarse: the next change might have the same time."""
    monkeypatch.setattr(disk_identity, "SETTLED_NS", 10**15)
    assert identity(files) == identity(files) and len(hashed) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "directory", "fifo", "link"])
def test_a_damaged_list_is_ignored_and_replaced(files: list[Path], hashed: list[str], damage: str) -> None:
    first = identity(files)
    path = files[0].parents[1] / "kv" / CACHE_FILE
    content = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage in ("cut", "empty", "foreign"):
        path.write_bytes({"cut": content[:-1], "empty": b"", "foreign": b"[" * 100_000}[damage])
    else:
        {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(path)}[damage]()
    assert identity(files) == first and len(hashed) == 4
    assert identity(files) == first and len(hashed) == (6 if damage == "directory" else 4)


def test_every_part_of_the_list_is_checked(files: list[Path]) -> None:
    first = identity(files)
    path = files[0].parents[1] / "kv" / CACHE_FILE
    content = path.read_bytes()
    for byte in range(0, len(content), 5):
        flipped = bytearray(content)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        assert identity(files) == first


def test_entries_of_models_that_are_gone_are_dropped(files: list[Path], tmp_path: Path) -> None:
    identity(files)
    other = tmp_path / "other.json"
    other.write_text("{}")
    identity([*files, other])
    other.unlink()
    files[0].write_text("{ }")
    identity(files)
    content = (tmp_path / "kv" / CACHE_FILE).read_text()
    assert "other.json" not in content and content.count("config.json") == 1


def test_a_full_disk_only_means_to_read_again(
    files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert identity(files) == identity(files) and len(hashed) == 4
    assert os.listdir(files[0].parents[1] / "kv") == []


def test_a_file_that_is_written_meanwhile_is_an_error(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.file_digest

    def file_digest(file: Any, name: Any) -> Any:
        result = digest(file, name)
        Path(file.name).write_text("changed")
        return result

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    with pytest.raises(ModelLoadError, match=r"config.json' was changed while it was read"):
        identity(files)


def test_a_file_that_is_missing_is_an_error(files: list[Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"none' cannot be read \(No such file or directory\)"):
        identity([*files, files[0].parent / "none"])


def test_an_unusable_directory_is_an_error(files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="disk_path="):
        model_identity(files, {}, files[0])
