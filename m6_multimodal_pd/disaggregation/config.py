"""Configuration of a group: the number of its engines, and their connections.

vLLM: `KVTransferConfig`; SGLang: `--disaggregation-mode`, `--disaggregation-transfer-backend` of `ServerArgs`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from m1_single_request.config import check_path
from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import NonNegativeInt, PositiveInt, check_fields
from m5_chunked_prefill_spec.config import PositiveFloat

TransportName = Literal["shared_memory", "in_process"]
NumEngines = Annotated[int, Meta(ge=1, le=64)]
HEARTBEAT_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class DisaggregationConfig:
    """Prefill engines and decode engines in place of one engine that does both. Each has the whole configuration of the
    engine: its own KV memory, prefix cache and limits."""

    prefill: NumEngines = 1
    """Engines that compute prompts."""
    decode: NumEngines = 1
    """Engines that compute answers."""
    transport: TransportName = "shared_memory"
    """`shared_memory`: each engine is a process of this host. `in_process`: all of them run in this one, in turns, for
    tests and lessons."""
    transfer_buffer_bytes: PositiveInt = 64 * 2**20
    """Size of the memory between a prefill and a decode engine, for KV that was sent and is not read yet."""
    max_message_bytes: Annotated[int, Meta(ge=16_384, le=2**63 - 1)] = 256 * 2**20
    """Largest size of a message between router and engine; the images of a request are the largest part, and
    an engine's report of its state must fit."""
    max_retries: NonNegativeInt = 2
    """Attempts of a request after the first one, with other engines if possible, after an engine was lost or a transfer
    has failed."""
    max_restarts: NonNegativeInt = 3
    """Restarts of each engine within an hour after its process has died, or could not start again. An engine that dies
    once more in that hour is not started again; the others go on without it."""
    address: str | None = None
    """Address at which engines join that are started by hand, such as `tcp://127.0.0.1:5600`. None: this process starts
    the engines."""
    key_file: str | Path | None = None
    """File with the keys of such engines and of the router; `python -m m6_multimodal_pd.pd keys FILE` makes it."""
    start_timeout_s: PositiveFloat = 180.0
    """Seconds within which an engine must be ready."""
    heartbeat_timeout_s: PositiveFloat = HEARTBEAT_TIMEOUT_S
    """A connection that is silent for so many seconds is closed, by either side. An engine without a connection is lost
    within about a second. A long step is not silence: a thread of ZeroMQ answers meanwhile."""
    step_timeout_s: PositiveFloat = 120.0
    """An engine whose step takes longer than so many seconds writes its stacks to stderr, and ends its process."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_path("key_file", self.key_file, optional=True)
        if self.address is not None and not isinstance(self.address, str):
            raise ConfigError(f"address={shown(self.address)} must be a text such as tcp://127.0.0.1:5600")
        if (self.address is None) != (self.key_file is None):
            raise ConfigError(
                "address and key_file go together: both, for engines that are started by hand, or neither"
            )
        if self.address is not None and self.transport == "in_process":
            raise ConfigError("engines of this process are not started by hand: address has no effect")
