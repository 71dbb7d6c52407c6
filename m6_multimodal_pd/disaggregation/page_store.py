"""The KV memory of an engine by the page: the bytes of a page, of all models and layers, as one row.

Up to m5 pages stay where they are computed. To send a page, its parts in K and V of every layer, and in those of a
draft model, are gathered into a row of bytes; the receiver scatters the row into any free page. A page keeps its bytes
and changes its number. On a GPU a copy between devices, or to the host, runs on a stream of its own while the engine
computes; pages themselves are read and written on the engine's stream only, in order with its steps. So no page is held
for a copy: a request may end at any time. vLLM: `nixl_connector.py` in `distributed/kv_transfer/kv_connector/v1/`
registers the tensors and lets the network card gather; SGLang: `KVArgs.kv_data_ptrs` and `kv_item_lens` in
`disaggregation/base/conn.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError, EngineDeadError, shown
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.kv_storage import KVStorage
from m6_multimodal_pd.errors import TransferError


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise `TransferError` if the device has no memory for a copy, `EngineDeadError` if it is lost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TransferError(f"there is no memory for KV on its way: {error}") from error
    except torch.AcceleratorError as error:
        raise EngineDeadError(f"KV cannot be copied any more: {error}") from error


class Copy:
    """A copy that a store has begun. On a CPU it is done then."""

    def __init__(self, rows: Tensor, event: Any = None) -> None:
        """`event`: of CUDA, behind the copy; None if it is done."""
        self.rows, self._event = rows, event  # uint8 [pages, page_bytes]: complete, and not before, when it is done

    @device_errors()
    def is_done(self) -> bool:
        """Return whether the copy is done; does not wait. Raises `EngineDeadError` if the device is lost."""
        return self._event is None or bool(self._event.query())


class PageStore:
    """The pages of one engine: the model's KV and, at the same page numbers, the draft model's.

    It keeps the tensors alive: to release KV memory, drop the store as well. `read`, `fetch` and `write` raise
    `TransferError` if the device has no memory for them, and `EngineDeadError` if it is lost.
    """

    def __init__(self, storages: Sequence[KVStorage]) -> None:
        """Raises `ConfigError` unless all storages have the same number of pages."""
        counts = [storage.config.num_blocks for storage in storages]
        if len(set(counts)) != 1:
            raise ConfigError(f"pages that go together need storages of as many pages each, not {shown(counts)}")
        self.num_pages = counts[0]
        """Pages that requests may have: 1 to `num_pages`. Page 0 is never allocated."""
        self.layout = " + ".join(_layout(storage) for storage in storages)
        """Meaning of the bytes of a page. Only engines with equal layouts may exchange pages."""
        memories = [storage.blocks.flatten(2).view(torch.uint8) for storage in storages]  # [tensors, pages, bytes]
        # Numbers of 8 bytes are copied several times faster than bytes; only very small models have none.
        self._unit = torch.uint8 if any(memory.shape[2] % 8 for memory in memories) else torch.int64
        self._memories = [memory.view(self._unit).transpose(0, 1) for memory in memories]  # [pages, tensors, units]
        self._widths = [memory[0].numel() for memory in self._memories]
        self.page_bytes = sum(self._widths) * self._unit.itemsize
        """Size of a page in all storages: the width of a row."""
        self.device = self._memories[0].device
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def check_pages(self, pages: Sequence[int]) -> None:
        """Raise `TransferError` unless all these pages exist, may be allocated, and are named once."""
        wrong = [page for page in pages if not 0 < page <= self.num_pages]
        if wrong:
            raise TransferError(f"there are no pages {shown(wrong)} to be moved, only 1 to {self.num_pages}")
        if len(set(pages)) != len(pages):
            raise TransferError(f"pages {shown(list(pages))}: one of them is named twice")

    @device_errors()
    @torch.inference_mode()
    def read(self, pages: Sequence[int], rows: Tensor) -> Copy:
        """Begin to copy these pages into `rows`, uint8 `[len(pages), page_bytes]` on the host or on this device.

        They are gathered behind the kernels that are queued on the current stream, and before later ones: the pages may
        change once this returns. Raises `TransferError` for a page that cannot be moved.
        """
        self.check_pages(pages)
        here = rows if rows.device == self.device else torch.empty_like(rows, device=self.device)
        for memory, index, part in self._parts(pages, here):
            torch.index_select(memory, 0, index, out=part)
        if self._stream is None:
            return Copy(rows)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if here is not rows:
            with torch.cuda.stream(self._stream):
                rows.copy_(here, non_blocking=True)
            here.record_stream(self._stream)
        return Copy(rows, self._stream.record_event())

    @device_errors()
    @torch.inference_mode()
    def fetch(self, rows: Tensor) -> Copy:
        """Begin to copy rows of the host, or of another engine's GPU, to this device, beside its steps. On a CPU they
        are used where they are."""
        if self._stream is None:
            return Copy(rows)
        with torch.cuda.stream(self._stream):
            here = torch.empty_like(rows, device=self.device)
            here.copy_(rows, non_blocking=True)
        return Copy(here, self._stream.record_event())

    @device_errors()
    @torch.inference_mode()
    def write(self, pages: Sequence[int], rows: Tensor) -> None:
        """Copy the rows of a `fetch` that is done into these pages, behind the kernels that are queued on the current
        stream. Raises `TransferError` before anything is written."""
        self.check_pages(pages)
        for memory, index, part in self._parts(pages, rows):
            memory.index_copy_(0, index, part)
        if self._stream is not None:
            rows.record_stream(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait for all copies: what they read or write may be unmapped then."""
        if self._stream is not None:
            with suppress(torch.AcceleratorError):  # a lost device copies nothing any more
                self._stream.synchronize()

    def _parts(self, pages: Sequence[int], rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each storage, the page numbers on its device, and its share of the rows: `[len(pages), tensors, units]`."""
        shares = torch.split(rows.view(self._unit), self._widths, dim=1)
        index = to_device(torch.tensor(pages, dtype=torch.int64), self.device)
        for memory, share in zip(self._memories, shares, strict=True):
            yield memory, index, share.view(len(pages), *memory.shape[1:])


def _layout(storage: KVStorage) -> str:
    """Return `4 x [16, 2, 64] bfloat16`: number of tensors, shape of a page in each, and the format of its numbers."""
    spec, (keys, *_) = storage.config.spec, storage.layer(0)
    return f"{2 * spec.num_layers} x {list(keys.shape[1:])} {str(spec.dtype).removeprefix('torch.')}"
