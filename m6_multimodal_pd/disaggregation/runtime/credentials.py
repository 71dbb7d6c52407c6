"""Who may talk to whom: which addresses are private enough, the shared secret, and keys for everything else.

New in this milestone, because a port is open to others. A loopback port is open to every user of the machine, so each
side proves first that it knows a secret; the secret itself never travels. Another machine's port is open to the whole
network, so there CURVE keys are a must: they encrypt, and a peer without a known key never gets a message through.
vLLM and SGLang trust their network: both bind without keys, and vLLM's guide on security asks for a closed one.
"""

import hmac
import re
import struct
from collections.abc import Set
from dataclasses import dataclass, field
from ipaddress import ip_address

import zmq
from zmq.utils import z85

from m1_single_request.errors import ConfigError, shown

MIN_SECRET_BYTES = 16

ENGINE = b"engine"
ROUTER = b"router"

TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[\w.*-]+):(\*|[0-9]{1,5})")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_address(address: object, keys: object) -> None:
    """Raise `ConfigError` unless this is an address of ours, and one that needs no keys where there are none."""
    if not isinstance(address, str) or "\0" in address:
        raise ConfigError(f"address={shown(address)} must be a text, such as 'tcp://127.0.0.1:*'")
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return
    found = TCP.fullmatch(address)
    if found is None or (found[2] != "*" and int(found[2]) > 65535):
        raise ConfigError(f"address={shown(address)} must be tcp://HOST:PORT or ipc://PATH")
    if keys is None and not is_loopback(found[1].strip("[]")):
        raise ConfigError(
            f"address={shown(address)} can be reached from other machines: give CURVE keys, or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name, `localhost` too, may lead anywhere."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_secret(secret: object) -> None:
    """Raise `ConfigError` unless nobody guesses it. The value is never shown."""
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the secret must be at least {MIN_SECRET_BYTES} random bytes, as secrets.token_bytes makes")


def proof(secret: bytes, side: bytes, identity: bytes) -> bytes:
    """What only one who knows the secret can say. It holds for one connection and one side of it."""
    return hmac.digest(secret, side + b":" + identity, "sha256")


def is_proof(claim: bytes, secret: bytes, side: bytes, identity: bytes) -> bool:
    """Whether `claim` is that proof, in a time that tells nothing about it."""
    return hmac.compare_digest(claim, proof(secret, side, identity))


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """One side's own pair of keys and the public keys that it trusts, each of them 40 characters (Z85)."""

    public: str
    secret: str = field(repr=False)
    trusted: frozenset[str]
    """Of an engine: the router's. Of a router: those of all engines that it lets in."""

    def __post_init__(self) -> None:
        if not (is_key(self.public) and is_key(self.secret)) or derived(self.secret) != self.public:
            raise ConfigError(f"public={shown(self.public)} is not the public key of the given secret one")
        if not isinstance(self.trusted, Set) or not all(is_key(key) for key in self.trusted):
            raise ConfigError(f"trusted={shown(self.trusted)} must be a set of public keys, 40 characters each")

    @classmethod
    def generate(cls) -> tuple["CurveKeys", "CurveKeys"]:
        """A router's keys, and keys that its engines share."""
        (router, its_secret), (engine, their_secret) = new_pair(), new_pair()
        return (
            cls(public=router, secret=its_secret, trusted=frozenset({engine})),
            cls(public=engine, secret=their_secret, trusted=frozenset({router})),
        )


def new_pair() -> tuple[str, str]:
    """A public key and its secret one."""
    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CURVE: install a wheel of pyzmq, or stay on 127.0.0.1")
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def derived(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode()).decode()


def is_key(key: object) -> bool:
    """Whether `key` can be a key of either kind."""
    try:
        return isinstance(key, str) and len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):  # a character that is none of Z85, not of ASCII, beyond 32 bits
        return False


class Doorkeeper:
    """Answers ZeroMQ, for every peer that connects, whether its public key may come in (ZAP, ZeroMQ's RFC 27).

    pyzmq's own authenticator does this in a thread. Here it is one more socket of the same loop, so that nothing runs
    beside the engine and nothing is left behind; the price is that a peer waits at the door until the loop comes by,
    and gives up after ZeroMQ's 30 seconds.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", trusted: Set[str]) -> None:
        self._trusted = {z85.decode(key) for key in trusted}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")  # where libzmq asks

    def answer(self) -> str | None:
        """Answer the next question; why not, if the answer was no. Raises zmq.Again if nobody asks."""
        version, number, _, place, _, mechanism, *proofs = self.socket.recv_multipart(zmq.NOBLOCK)
        welcome = mechanism == b"CURVE" and len(proofs) == 1 and proofs[0] in self._trusted
        status = [b"200", b"OK"] if welcome else [b"400", b"unknown key"]
        self.socket.send_multipart([version, number, *status, b"", b""])
        return None if welcome else f"a peer at {shown(place.decode(errors='replace'))} with an unknown key"
