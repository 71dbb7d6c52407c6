"""Copies between engines on a real GPU: behind the steps, beside them, in locked memory, and between two processes.

What needs no GPU is in `test_pd_copies.py`.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from m1_single_request.trace_readers import Records
from m6_multimodal_pd.disaggregation.events import PathChosen
from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments
from m6_multimodal_pd.disaggregation.runtime.messages import DeviceSegment
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.errors import TransferError
from tests.m6_multimodal_pd.processes import eventually
from tests.m6_multimodal_pd.transfers import Pair, sent

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LONG = 500_000_000
"""Cycles of a kernel that does nothing: a quarter of a second."""
NUM_BYTES = 2**20


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("shared_memory", device="cuda")
    yield pair
    pair.source.close(), pair.target.close()


def test_segments_are_page_locked_as_long_as_they_are_mapped(pair: Pair) -> None:
    records, own = Records(), pair.source.targets["d"].memory
    assert own.is_pinned()
    pair.target.tracer.attach(records)
    pair.target.forget("p")
    again = StagedSource(pair.ours.store, pair.segments, num_frames=4)
    pair.target.map("p", sent(again))
    mapped = pair.target._sources["p"].memory
    refused = [event.why for _, event in records.of(PathChosen)]
    assert mapped.is_pinned() or "cannot be page-locked" in refused[0], "a machine may not lock what is read only"
    pair.source.close(), pair.target.close(), again.close()
    assert not own.is_pinned() and not mapped.is_pinned()
    torch.ones(1, device="cuda").item()  # no error of CUDA is left behind


def test_a_page_is_read_behind_its_kernels_and_before_later_ones_and_nobody_waits(pair: Pair) -> None:
    pair.move([2], [2])  # whatever is made once
    blocks, store = pair.ours.storages[0].blocks, pair.ours.store
    value = torch.randint(256, (blocks[:, 7].nbytes,), dtype=torch.uint8, device="cuda").view(blocks.dtype)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch warns once that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(LONG)
        blocks[:, 7] = value.view_as(blocks[:, 7])
        ticket = pair.source.send("d", [7])
        blocks[:, 7] = 0
        assert ticket is not None and pair.source.ready("d", ticket) is None, "it waits for the kernel"
        assert eventually(lambda: pair.source.ready("d", ticket) is not None)
        torch.cuda._sleep(LONG)  # the next step of the other engine
        arrival = pair.target.receive("p", ticket, [3])
        assert eventually(arrival.copy.is_done, 0.2), "it does not wait for the step"
        assert not torch.cuda.current_stream().query()
        arrival.write()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = pair.theirs.storages[0].blocks[:, 3].contiguous().view(torch.uint8).flatten()
    assert torch.equal(found, value.view(torch.uint8)) and store.device.type == "cuda"


SOURCE = f"""
import sys
import msgspec
import torch
from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments

segment, memory = DeviceSegments(torch.device("cuda:0")).create({NUM_BYTES})
memory.copy_(torch.arange({NUM_BYTES}, device="cuda:0") % 251)
torch.cuda.synchronize()
print(msgspec.msgpack.encode(segment).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[DeviceSegment]:
    """Memory of another process on the same GPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=DeviceSegment)
        process.stdin.close()
        assert process.wait(60) == 0


def test_another_process_on_the_same_gpu_reads_a_segment(shared: DeviceSegment) -> None:
    segments = DeviceSegments(torch.device("cuda:0"))
    memory = segments.open(shared, NUM_BYTES)
    expected = torch.arange(NUM_BYTES, device="cuda:0") % 251
    assert memory.shape == (NUM_BYTES,) and torch.equal(memory.long(), expected)
    changes: list[dict[str, Any]] = [{"num_bytes": 8}, {"device": "GPU-0"}, {"handle": bytes(len(shared.handle))}]
    for change in changes:
        with pytest.raises(TransferError):
            segments.open(msgspec.structs.replace(shared, **change), NUM_BYTES)
    assert torch.equal(memory.long(), expected), "a refused handle leaves no error of CUDA behind"
    with warnings.catch_warnings():  # torch may warn that the producer is gone
        warnings.simplefilter("ignore")
        del memory
