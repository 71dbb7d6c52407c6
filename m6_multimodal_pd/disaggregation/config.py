"""Configuration of a group: the number of its engines, their devices, and their connections.

vLLM: `KVTransferConfig`; SGLang: `--disaggregation-mode`, `--disaggregation-transfer-backend` of `ServerArgs`.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from m1_single_request.config import check_path
from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import NonNegativeInt, PositiveInt, check_fields
from m5_chunked_prefill_spec.config import PositiveFloat

Role = Literal["prefill", "decode", "both"]
TransportName = Literal["shared_memory", "in_process"]
NumEngines = Annotated[int, Meta(ge=1, le=64)]
HEARTBEAT_TIMEOUT_S = 15.0
FIRST_ENGINE = "prefill-0"
DEVICES = re.compile(r" *(cpu|cuda)(:(0|[1-9][0-9]?))? *(, *\1(:(0|[1-9][0-9]?))? *)*")


@dataclass(frozen=True, kw_only=True)
class DisaggregationConfig:
    """Engines behind a router, in place of one engine: prefill engines and decode engines, or engines that do both.
    Each has the whole configuration of the engine: its own KV memory, prefix cache and limits."""

    prefill: NumEngines = 1
    """Engines that compute prompts."""
    decode: NumEngines = 1
    """Engines that compute answers."""
    both: Annotated[int, Meta(ge=0, le=64)] = 0
    """Engines that compute prompts and answers, in place of prefill and decode engines."""
    devices: str | None = None
    """Devices of the engines, such as `cuda:0,cuda:1`: one for each, those of the prefill engines first. None: all
    engines are on the device of the model. Engines on one device divide its memory: each takes an equal part of
    `gpu_memory_utilization`."""
    transport: TransportName = "shared_memory"
    """`shared_memory`: each engine is a process of this host. `in_process`: all of them run in this one, in turns, for
    tests and lessons."""
    transfer_buffer_bytes: PositiveInt = 64 * 2**20
    """Size of the memory between a prefill and a decode engine, for KV that was sent and is not read yet: of the
    prefill engine's GPU if the decode engine can read it, else of the host. On a GPU neither this nor the chunks that
    are being copied are part of the KV memory: they use what `gpu_memory_utilization` leaves free."""
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
        if self.both and (self.prefill, self.decode) != (1, 1):
            raise ConfigError(f"both={self.both}: prefill and decode have no effect, because all engines do both")
        if self.address is not None and not isinstance(self.address, str):
            raise ConfigError(f"address={shown(self.address)} must be a text such as tcp://127.0.0.1:5600")
        if (self.address is None) != (self.key_file is None):
            raise ConfigError(
                "address and key_file go together: both, for engines that are started by hand, or neither"
            )
        if self.address is not None and self.transport == "in_process":
            raise ConfigError("engines of this process are not started by hand: address has no effect")
        if self.devices is None:
            return
        if self.address is not None:
            raise ConfigError("devices has no effect on a router whose engines are started by hand: give it to them")
        named, num_engines = len(parsed_devices(self.devices)), sum(self.engines.values())
        if named != num_engines:
            raise ConfigError(
                f"devices={shown(self.devices)} names {named}, and the group has {num_engines} engines "
                f"({', '.join(f'{role}={number}' for role, number in self.engines.items())}): name one for each"
            )

    @property
    def engines(self) -> dict[Role, int]:
        """Number of engines of each role that the group has."""
        return {"both": self.both} if self.both else {"prefill": self.prefill, "decode": self.decode}

    def num_engines_on(self, device: torch.device) -> int:
        """Return the number of engines on the device of one of them. Raises `ConfigError` if `devices` lacks it."""
        if self.devices is None:
            return sum(self.engines.values())
        number = parsed_devices(self.devices).count((device.type, device.index or 0))
        if number == 0:
            raise ConfigError(f"device={device} is not one of devices={shown(self.devices)} of the group")
        return number

    def device_of(self, name: str) -> str | None:
        """Return the device of an engine by its name: `decode-0`, or `decode-0_1` after a restart. None: the model's
        device."""
        if self.devices is None:
            return None
        role, _, number = name.partition("_")[0].partition("-")
        index = int(number) + (self.prefill if role == "decode" else 0)
        return self.devices.split(",")[index].strip()


def parsed_devices(devices: str) -> list[tuple[str, int]]:
    """Return type and index of each device. Raises `ConfigError` for a text that does not name devices of one type,
    because KV and precision differ between the types."""
    if not isinstance(devices, str) or not DEVICES.fullmatch(devices):
        raise ConfigError(f"devices={shown(devices)} must be a list of GPUs, or of CPUs, such as cuda:0,cuda:1")
    parsed = [torch.device(name.strip()) for name in devices.split(",")]
    return [(device.type, device.index or 0) for device in parsed]


def on_own_device(config: Any, name: str) -> Any:
    """Return the configuration of a group with the device of the engine of this name.

    Raises `ConfigError` if this machine lacks the device, or if the model names one as well.
    """
    group, model = config.disaggregation, config.model
    device = group.device_of(name)
    if device is None:
        return config
    if model.device != "auto":
        raise ConfigError(f"device={shown(model.device)} and devices={shown(group.devices)}: leave out one of them")
    return replace(config, model=replace(model, device=device))
