"""Several devices on a CPU: which of them is current, and where the work of an engine runs; and a GPU's memory, faked.

torch names them `cpu:0`, `cpu:1`, ...: their tensors lie in the same memory, and an engine with
`ModelConfig(device="cpu:1")` keeps the name. On a GPU a kernel of Triton, pinned memory, and an event or a graph that
names no device go to the current device. So `Devices` puts guards that count in the place of `current_device`, and
notes which device is current wherever an engine computes, reserves or copies memory.
"""

import functools
import sys
from typing import Any

import pytest
import torch

from m3_paged_attention import device_limits, kv_cache_config
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.worker import current_device
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.graph_runner import GraphRunner
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from m6_multimodal_pd.models.vision import VisionTower

WORK: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Decoder, ("forward", "compute_logits")),
    (Qwen3VLDecoder, ("forward",)),
    (VisionTower, ("encode",)),
    (KVStorage, ("__init__", "copy_blocks", "swap_in", "swap_out")),
    (GraphRunner, ("__init__", "__call__")),
    (PageStore, ("read", "fetch", "write")),
)
"""What runs kernels, or reserves memory that is pinned or kept."""


class Devices:
    """The current device, as guards set it, and all work since the start: what did it, its name, and the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: str = "cpu:1") -> None:
        """`engine`: the device of an engine that is alone."""
        self.engine = torch.device(engine)
        self.entered: list[torch.device] = []
        self.work: list[tuple[object, str, str]] = []
        replace_everywhere(monkeypatch, current_device, self.current)
        for owner, names in WORK:
            for name in names:
                monkeypatch.setattr(owner, name, self._noting(f"{owner.__name__}.{name}", vars(owner)[name]))
        devices = self

        class Event:
            """In place of `torch.cuda.Event`."""

            def __init__(self, enable_timing: bool) -> None:
                devices.note(self, "Event.__init__")

            def record(self) -> None:
                devices.note(self, "Event.record")

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: object) -> float:
                return 1.0

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def current(self, device: torch.device) -> "Guard":
        """In place of `current_device`. A tensor has no index on a CPU: its device is that of the engine."""
        return Guard(self.entered, self.engine if device.index is None else device)

    @property
    def now(self) -> str:
        return str(self.entered[-1]) if self.entered else "none"

    def note(self, owner: object, name: str) -> None:
        self.work.append((owner, name, self.now))

    def of(self, owner: object) -> set[str]:
        """The devices that were current in the work of one object."""
        return {where for each, _, where in self.work if each is owner}

    def check(self, device: str, *names: str) -> None:
        """All work since the last call ran on this device; there was some of each of these names."""
        assert not self.entered
        astray = {(name, where) for _, name, where in self.work if where != device}
        assert not astray, astray
        missing = set(names) - {name for _, name, _ in self.work}
        assert not missing, f"nothing is tested by a run without {missing}"
        self.work.clear()

    def _noting(self, name: str, usual: Any) -> Any:
        @functools.wraps(usual)
        def noted(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(owner, name)
            return usual(owner, *args, **kwargs)

        return noted


class Guard:
    """A context in which a device is the current one; as torch's, it may be entered again once it was left."""

    def __init__(self, entered: list[torch.device], device: torch.device) -> None:
        self.entered, self.device, self.is_entered = entered, device, False

    def __enter__(self) -> None:
        assert not self.is_entered, "torch's would forget which device was current before"
        self.entered.append(self.device)
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        assert self.entered.pop() is self.device
        self.is_entered = False


def replace_everywhere(monkeypatch: pytest.MonkeyPatch, usual: Any, other: Any) -> None:
    """Replace a function of the packages in every module that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("m") and vars(module).get(usual.__name__) is usual:
            monkeypatch.setattr(module, usual.__name__, other)


class GPUMemory:
    """The CPU as a GPU of `total` bytes, as far as sizes of an engine follow from its memory.

    `peak`: of the largest step, without KV. `others`: what other processes use, one number for each measurement; the
    last one goes on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, peak: int = 0, others: tuple[int, ...] = (0,)):
        left = list(others)

        def mem_get_info(device: object) -> tuple[int, int]:
            return total - (left.pop(0) if len(left) > 1 else left[0]), total

        def needs_profile(cache_config: Any, device: object) -> bool:
            return cache_config.num_blocks is None and cache_config.kv_cache_memory_bytes is None

        replace_everywhere(monkeypatch, device_limits.device_memory, lambda device: total)
        replace_everywhere(monkeypatch, kv_cache_config.needs_profile, needs_profile)
        self.kv_bytes = 0  # of the profiling run
        usual = KVStorage.__init__

        def noted(storage: KVStorage, *args: Any, **kwargs: Any) -> None:
            usual(storage, *args, **kwargs)
            self.kv_bytes = storage.blocks.nbytes

        monkeypatch.setattr(KVStorage, "__init__", noted)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak + self.kv_bytes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
