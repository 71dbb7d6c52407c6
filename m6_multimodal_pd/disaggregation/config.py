"""How many engines share the work, and how they reach each other.

vLLM: `KVTransferConfig`; SGLang: `--disaggregation-mode`, `--disaggregation-transfer-backend` of `ServerArgs`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m1_single_request.config import check_path, check_whole_number
from m1_single_request.errors import ConfigError, shown
from m3_paged_attention.config import check_choice
from m5_chunked_prefill_spec.config import check_positive

TransportName = Literal["shared_memory", "in_process"]
MAX_ENGINES = 64
HEARTBEAT_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class DisaggregationConfig:
    """Prefill engines and decode engines in place of one that does both. Each has the whole configuration of the
    engine: its own KV memory, prefix cache and limits."""

    prefill: int = 1
    """Engines that compute prompts."""
    decode: int = 1
    """Engines that answer."""
    transport: TransportName = "shared_memory"
    """`shared_memory`: each engine is a process of this host. `in_process`: all of them run in this one, in turns, for
    tests and to look at."""
    transfer_buffer_bytes: int = 64 * 2**20
    """Memory between a prefill and a decode engine: KV that was sent and not read yet."""
    max_message_bytes: int = 256 * 2**20
    """Of a message between router and engine; the pictures of a request are the largest."""
    max_retries: int = 2
    """How often a request is tried anew, with other engines if there are, after an engine was lost or a transfer
    failed."""
    max_restarts: int = 3
    """How often within an hour each engine is started anew after its process has died, or could not start again. One
    that dies once more in that hour stays away; the others go on without it."""
    address: str | None = None
    """Where engines join that are started by hand, `tcp://127.0.0.1:5600`, say. None: they are started from here."""
    key_file: str | Path | None = None
    """The keys of such engines and of this side: made by `python -m m6_multimodal_pd.pd keys FILE`."""
    start_timeout_s: float = 180.0
    """Seconds that an engine may take until it is ready."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """A connection that is silent for so many seconds is closed, by either side. An engine without a connection is lost
    within about a second. A long step is not silence: a thread of ZeroMQ answers meanwhile."""
    step_timeout_s: float = 120.0
    """An engine whose step takes longer than so many seconds writes down where it hangs, and gives itself up."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            check_whole_number(name, getattr(self, name), low=1)
            if getattr(self, name) > MAX_ENGINES:
                raise ConfigError(f"{name}={getattr(self, name)} engines are too many: at most {MAX_ENGINES}")
        check_choice("transport", self.transport, TransportName)
        if self.address is not None and not isinstance(self.address, str):
            raise ConfigError(f"address={shown(self.address)} must be a text such as tcp://127.0.0.1:5600")
        if self.key_file is not None:
            check_path("key_file", self.key_file)
        if (self.address is None) != (self.key_file is None):
            raise ConfigError(
                "address and key_file go together: both, for engines that are started by hand, or neither"
            )
        if self.address is not None and self.transport == "in_process":
            raise ConfigError("engines of this process are not started by hand: address has no effect")
        for name in ("transfer_buffer_bytes", "max_message_bytes"):
            check_whole_number(name, getattr(self, name), low=1)
        for name in ("max_retries", "max_restarts"):
            check_whole_number(name, getattr(self, name), low=0)
        for name in ("start_timeout_s", "heartbeat_timeout_s", "step_timeout_s"):
            check_positive(name, getattr(self, name))
