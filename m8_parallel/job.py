"""Joins the job that torchrun has started: its store, the heartbeats, and the number of this rank."""

import os
import secrets
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from m1_single_request.errors import ConfigError
from m8_parallel.errors import RankLostError
from m8_parallel.ranks import CPU, Ranks
from m8_parallel.watch import Watch

PAUSE_S = 0.02
"""Between two looks for the names of other ranks."""


def place() -> tuple[int, int]:
    """Return the number of this rank and of all, by the environment that torchrun has made; 0 and 1 without one."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(*, step_timeout_s: float, long_timeout_s: float, on_gpu: bool) -> Ranks:
    """Join the job of the environment that torchrun has made; a process without one is alone."""
    if place()[1] == 1:
        return Ranks()
    if dist.is_initialized():
        raise ConfigError("torch.distributed is in use in this process, by another engine perhaps: close it first")
    try:
        store, rank, size = next(rendezvous("env://"))
        of_watch, _, _ = next(rendezvous("env://"))
        job = name_of_start(store, rank, size, long_timeout_s)
        watch = Watch(rank, size, PrefixStore(job, of_watch))
    except dist.DistError as error:
        raise RankLostError(f"the store of the job cannot be reached: {error}") from error
    device = CPU
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # torchrun sets 1: NCCL's watchdog would end this process when another rank aborts the group
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    timeouts = {"step_timeout_s": step_timeout_s, "long_timeout_s": long_timeout_s}
    return Ranks(rank, size, PrefixStore(job, store), watch, device=device, **timeouts)


def name_of_start(store: Any, rank: int, size: int, limit_s: float) -> str:
    """Return a new name for a job of these ranks, the same on all. Raises `RankLostError` after `limit_s`.

    The store has the notes of earlier jobs: of engines that were closed, and of ranks that torchrun has started before,
    whose number may differ between hosts. So each rank writes a random name. Rank 0 proposes the list of all until
    every rank has found its own in it.
    """

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    own, end = secrets.token_hex(8), time.monotonic() + limit_s
    store.set(f"name {rank}", own)
    while time.monotonic() < end:
        if rank == 0:
            names = " ".join(read(f"name {each}") for each in range(size))
            store.set("proposed", names)
            if all(read(f"seen by {other}") == names for other in range(1, size)):
                store.set("agreed", names)
                return own
        else:
            if own in (proposed := read("proposed")).split():
                store.set(f"seen by {rank}", proposed)
            if own in (agreed := read("agreed")).split():
                return agreed.split()[0]
        time.sleep(PAUSE_S)
    raise RankLostError(f"rank {rank}: the other ranks did not start within {limit_s:g} s")
