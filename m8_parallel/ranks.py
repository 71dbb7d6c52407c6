"""The ranks of a job: their numbers, and the few collectives with which they compute one model.

A *rank* is a process of the job; torchrun starts them and gives each a number. A *collective* is an operation that all
ranks enter together, each with its own tensor: an all-reduce adds the tensors up, a gather brings them to rank 0, a
broadcast takes one from rank 0 to all. `torch.distributed` has them, over gloo or NCCL. Here is what an engine needs
besides:

    a record of all collectives (`record`), bytes of any length, and typed errors
    `agree`: the error of one rank is the error of all
    `together`: an error inside a step; the others leave their collective at once, and all can go on
    `arrive`: on GPUs a host only queues a collective, and waits for it when all ranks have queued it

vLLM: `distributed/parallel_state.py` (`GroupCoordinator`); SGLang the same. There an error on one rank ends the job.
"""

import math
import re
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group

from m1_single_request.errors import ConfigError, EngineDeadError
from m3_paged_attention.worker import current_device
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of, fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Fault
from m8_parallel.collective_record import Collective, CollectiveRecord
from m8_parallel.errors import RanksDifferError
from m8_parallel.notes import Notes, T
from m8_parallel.watch import Watch

HEAD_BYTES, FIRST_BYTES = 8, 1024
"""Of a message: its length, and what goes with it in one broadcast."""
CPU = torch.device("cpu")
LOOK_S = 0.00005
"""Between two looks at a device."""
LOOKS_PER_NOTE = 200
"""Looks at a device for each one into the store."""


class Interrupted(Exception):
    """Another rank has left the step because of an error."""


class Ranks(Notes):
    """This process among the ranks of its job; without a store it is alone, and has no collectives."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Any = None,
        watch: Watch | None = None,
        *,
        device: torch.device = CPU,
        step_timeout_s: float = 10.0,
        long_timeout_s: float = 600.0,
    ) -> None:
        """`rank`: its number; rank 0 has the user. `store`: for notes (`torch.distributed.Store`). `watch`: heartbeats
        of the ranks, closed if they do not all join. `device`: of the model. `long_timeout_s`: of a `meet`.

        Raises `RankLostError`, and `ConfigError` for a device that cannot be used.
        """
        super().__init__(rank, size, store, watch, long_timeout_s)
        self.device, self.step_timeout_s = device, step_timeout_s
        self.in_step = False
        """Whether another rank may leave the group, because of an error of the step."""
        self.record = CollectiveRecord()
        self.graphs: WeakSet[Any] = WeakSet()
        """What has CUDA graphs of the group."""
        self._messages = self._agreements = self._arrivals = 0
        if size > 1:
            try:
                self.meet()
                self._form()
            except BaseException:
                self._abort()
                self.watch.close()
                raise

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_queued(self) -> bool:
        """Whether a host only queues the collectives of its device, as it does with NCCL."""
        return self.device.type == "cuda"

    @property
    def is_capturing(self) -> bool:
        """Whether this rank captures a CUDA graph now."""
        return self.is_queued and torch.cuda.is_current_stream_capturing()

    # --- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up the tensors of all ranks, in place; every rank has the same bits afterwards."""
        self._run("all-reduce", tensor, lambda: dist.all_reduce(tensor))
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor by that of rank 0."""
        self._run("broadcast", tensor, lambda: dist.broadcast(tensor, 0))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of the same shape, on rank 0; nothing on others."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_first else None
        self._run("gather", tensor, lambda: dist.gather(tensor, parts))
        return parts or []

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of the same shape, on every rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run("all-gather", tensor, lambda: dist.all_gather(parts, tensor))
        return parts

    def largest(self, *values: float) -> list[float]:
        """Return the largest of each value among all ranks."""
        return self._reduced(dist.ReduceOp.MAX, values)

    def smallest(self, *values: float) -> list[float]:
        """Return the smallest of each value among all ranks."""
        return self._reduced(dist.ReduceOp.MIN, values)

    def send_to_all(self, data: bytes) -> None:
        """Give bytes to `receive` of all others; on rank 0. Few bytes are one broadcast, with their number."""
        first, rest = data[: FIRST_BYTES - HEAD_BYTES], data[FIRST_BYTES - HEAD_BYTES :]
        self._broadcast(bytearray(len(data).to_bytes(HEAD_BYTES, "little") + first.ljust(FIRST_BYTES - HEAD_BYTES)))
        if rest:
            self._broadcast(bytearray(rest))

    def receive(self) -> bytes:
        """Return the bytes of rank 0."""
        first = self._broadcast(bytearray(FIRST_BYTES))
        length = int.from_bytes(first[:HEAD_BYTES], "little")
        rest = length - (FIRST_BYTES - HEAD_BYTES)
        return bytes(first[HEAD_BYTES : HEAD_BYTES + length] + (self._broadcast(bytearray(rest)) if rest > 0 else b""))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, on rank 0; nothing on others."""
        if self.size == 1:
            return [data]
        self.meet()
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(data)]))]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes) + 1)), dtype=torch.uint8)
        return [part.numpy().tobytes()[:size] for part, size in zip(self.gather(padded), sizes, strict=False)]

    def _broadcast(self, data: bytearray) -> bytearray:
        """Overwrite bytes by those of rank 0."""
        self.broadcast(torch.frombuffer(data, dtype=torch.uint8))
        return data

    def _reduced(self, operation: "dist.ReduceOp.RedOpType", values: tuple[float, ...]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self._run("all-reduce", tensor, lambda: dist.all_reduce(tensor, operation))
        reduced: list[float] = tensor.tolist()
        return reduced

    def _run(self, kind: str, tensor: Tensor, call: Callable[[], object]) -> None:
        if self.size == 1:
            return
        began = time.perf_counter()
        try:
            call()
        except torch.OutOfMemoryError:  # of this rank, for a copy
            raise
        except (RuntimeError, ValueError) as error:  # gloo's, NCCL's and that of a group that is gone
            traceback.clear_frames(error.__traceback__)  # they hold the group, whose threads end with it
            if (why := self._why_left()) is not None:
                self._raise_left(why)
            if self.is_capturing:  # the device is not lost: this cannot be captured
                raise
            raise self._lost(re.sub(r"^\[.*?\] |\. .*", "", str(error).splitlines()[0])) from error
        seconds = time.perf_counter() - began
        self.record.add(Collective(kind, tensor.nbytes, began, seconds))

    def _raise_left(self, why: str) -> None:
        """Raise what it means for this rank that another one has left the group (`_why_left`)."""
        if self.in_step and not why:
            raise Interrupted
        raise self._lost(why or "another rank has left a step that has ended here")

    # --- waits and errors ---------------------------------------------------------------------------------------------

    def lead(self, data: bytes) -> None:
        """Give bytes to `follow` of all others, which wake up."""
        self.check()
        self._note(lambda: self.store.add("messages", 1))
        self.send_to_all(data)

    def follow(self) -> bytes:
        """Wait without a timeout for the next message of rank 0; return its bytes."""
        self._messages += 1
        self._wait(lambda: self.store.add("messages", 0) >= self._messages)
        return self.receive()

    def meet_in_step(self) -> None:
        """`meet` inside a step, which ends if another rank leaves the group."""
        if self.size == 1:
            return
        self._arrivals += 1
        key, number = f"arrivals {self.num_groups}", self._arrivals * self.size
        self._note(lambda: self.store.add(key, 1))
        self._wait(lambda: self._why_left() is not None or self.store.add(key, 0) >= number, self.long_timeout_s)
        self._check_in_step()

    def wait_for(self, event: Any = None) -> None:
        """Wait for an event of CUDA, in short looks: if another rank is lost, or leaves the step, it may never come.

        None: for all that is queued now. Raises `RankLostError`, or `Interrupted` inside a step that another rank has
        left.
        """
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        if self.size == 1:
            event.synchronize()
            return
        looks = 0
        while not event.query():
            looks += 1
            if self.is_lost:
                raise self._lost(self.watch.lost)
            if looks % LOOKS_PER_NOTE == 0:
                self._check_in_step()
            time.sleep(LOOK_S)

    def arrive(self) -> None:
        """Wait until the hosts of all ranks are here, and what they have queued has ended; on CPUs nothing is queued.

        A host calls this between a collective and its first look at the result: a rank with an error may not have
        queued the collective, and the devices of the others wait for it. The wait for the hosts has the timeout of a
        step. Raises the errors of `wait_for`.
        """
        if self.is_queued and self.size > 1:
            self.smallest(0)
            self.wait_for()

    def _check_in_step(self) -> None:
        """Raise what it means that another rank has left the group, if one has."""
        if (why := self._why_left()) is not None:
            self._raise_left(why)

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error of the first rank that has one. Every rank calls this at the same place."""
        if self.size == 1:
            return error
        self._agreements += 1
        key = f"error {self._agreements} of rank"
        if error is not None:
            note = msgspec.msgpack.encode(fault_of(error))
            self._note(lambda: self.store.set(f"{key} {self.rank}", note))
        self.meet()
        first = int(self.smallest(self.size if error is None else self.rank)[0])
        if first in (self.rank, self.size):
            return error
        return error_of(msgspec.msgpack.decode(self._read(f"{key} {first}"), type=Fault), f"rank {first}")

    def agreed(self, call: Callable[[], T]) -> T:
        """Return `call()`; raise the error of the first rank where it has one. Every rank calls this."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as own:
            error = own
        agreed = self.agree(error)
        if agreed is not None:
            raise agreed
        return result  # type: ignore[return-value]

    def together(self, call: Callable[[], T]) -> T:
        """Return `call()`, a part of a step. Every rank calls this.

        `call` must end with a meeting, or a message of rank 0. An error of one rank before that is raised on all. Then
        they have left their group, so that none waits in a collective for ever, and have formed the next one. An error
        of the device itself ends the job, and so does a part that takes longer than any wait may: the device waits for
        a rank whose host hangs.
        """
        self.in_step = True
        if self.watch is not None:
            self.watch.deadline = time.monotonic() + self.long_timeout_s
        try:
            return call()
        except (EngineDeadError, torch.AcceleratorError) as error:  # this rank is lost
            self.leave(str(error))
            raise
        except Exception as error:
            if self.size == 1:
                raise
            traceback.clear_frames(error.__traceback__)
            self.form_anew()
            agreed = self.agree(None if isinstance(error, Interrupted) else error)
            raise agreed or RanksDifferError("another rank has left the step without an error") from None
        finally:
            self.in_step = False
            if self.watch is not None:
                self.watch.deadline = math.inf

    def form_anew(self) -> None:
        """Leave the group of a step, so that the others leave it, too, and form the next one with them."""
        self._note(lambda: self._note_end(""))
        self._abort()
        self.meet()
        self._form()

    def leave(self, why: str) -> None:
        """Leave the job because of an error of this rank, which ends it: the others need not wait for a timeout."""
        self.leads = False
        if self.size == 1:
            return
        with suppress(dist.DistError):
            self._note_end(f"rank {self.rank} has failed: {why}")
        self._abort()
        self.watch.lost = self.watch.lost or f"rank {self.rank} has left the job: {why}"

    def _abort(self) -> None:
        """End the collectives of this rank, and its group."""
        self.watch.release()
        for graphs in list(self.graphs):
            graphs.reset()  # first: NCCL waits for graphs that have the group
        if dist.is_initialized():
            _abort_process_group()  # the public function waits for kernels of NCCL, and they for other ranks

    def _form(self) -> None:
        self.num_groups, self._arrivals = self.num_groups + 1, 0
        store = PrefixStore(f"group {self.num_groups}", self.store)
        timeout = timedelta(seconds=self.step_timeout_s)
        on_gpu = self.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # messages and sums of hosts stay on the host
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error).splitlines()[0]) from error
        if on_gpu:
            self._connect(dist.group.WORLD._get_backend(self.device))  # type: ignore[union-attr]

    def _connect(self, nccl: Any) -> None:
        """Connect the devices of the ranks. NCCL does that in the first collective, and the host waits for it in C."""
        nccl._set_default_timeout(timedelta(seconds=self.long_timeout_s))  # its watchdog must not end a long wait
        self.watch.guard(f"left {self.num_groups}", nccl.abort)
        with self.record.uncounted():
            number = self.agreed(self._number_on_device)
            with current_device(self.device):
                self.all_reduce(number)
                self.wait_for()

    def _number_on_device(self) -> Tensor:
        try:
            return torch.zeros(1, device=self.device)
        except RuntimeError as error:
            raise ConfigError(f"rank {self.rank} cannot use {self.device}: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Leave the job."""
        self.leads = False
        if self.watch is not None:
            self.watch.close()
            for graphs in list(self.graphs):
                graphs.reset()
            if self.num_groups and dist.is_initialized():
                dist.destroy_process_group()
