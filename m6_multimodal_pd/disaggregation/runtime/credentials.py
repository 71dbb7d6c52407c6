"""Addresses, and the CURVE keys that decide which peers may connect.

New in this milestone, because a port is open to others: a loopback port to every user of the machine, any other one to
the network. So every connection uses CURVE, on loopback, too. CURVE encrypts, and authenticates both sides: an engine
connects only to the owner of the router's key, and `door.py` admits only the key of the engines. A proof of a shared
secret on top of it would keep out no further peer. vLLM and SGLang trust their network: both bind without keys, and
vLLM's guide on security requires a closed one.
"""

import os
import re
import struct
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from zmq.utils import z85

from m1_single_request.errors import ConfigError, shown

ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[\w.*-]+):(?:\*|([0-9]{1,5}))|ipc://[^\0]+")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of one side, each of 40 characters (Z85): its own pair, and the public key of the other side."""

    public: Key
    secret: Key
    trusted: Key
    """Of a router: that of its engines. Of an engine: that of its router."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is no key, or a pair that does not belong together."""
        try:
            z85.decode(self.trusted.encode())
            is_pair = zmq.curve_public(self.secret.encode()).decode() == self.public
        except (KeyError, ValueError, struct.error, zmq.ZMQError):
            is_pair = False
        if not is_pair:
            raise ConfigError(f"public={shown(self.public)}, trusted={shown(self.trusted)} are no keys that fit")

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, trusted={self.trusted!r})"


class GroupKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a group: those of the router, and those that its engines share."""

    router: CurveKeys
    engines: CurveKeys

    @classmethod
    def generate(cls) -> "GroupKeys":
        """Return new keys. Raises `ConfigError` if ZeroMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError("this build of ZeroMQ has no CURVE: install a wheel of pyzmq")
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        router, its_secret, engines, their_secret = (key.decode() for key in pairs)
        return cls(CurveKeys(router, its_secret, engines), CurveKeys(engines, their_secret, router))


def write_keys(path: str | Path) -> None:
    """Write new keys to a file that only its owner can read. Raises `ConfigError` if it exists or cannot be written."""
    text = msgspec.json.encode(GroupKeys.generate()) + b"\n"
    try:
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def read_keys(path: str | Path) -> GroupKeys:
    """Read a file of `write_keys`. Raises `ConfigError` for any other file, and for one that others can read."""
    try:
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others: chmod 600 it, or make new keys")
        return msgspec.json.decode(Path(path).read_bytes(), type=GroupKeys)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no file of keys: python -m m6_multimodal_pd.pd keys FILE makes one") from error


def check_address(address: object) -> None:
    """Raise `ConfigError` unless `address` is `tcp://HOST:PORT` or `ipc://PATH`."""
    found = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[2] or 0) > 65535:
        raise ConfigError(f"address={shown(address)} must be tcp://HOST:PORT or ipc://PATH")
