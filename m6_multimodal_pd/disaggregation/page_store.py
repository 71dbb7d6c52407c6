"""The KV memory of an engine by the page: the bytes of a page, of all models and layers, as one row.

Up to m5 pages stay where they are computed. To send a page, its parts in K and V of every layer, and in those of a
draft model, are gathered into a row of bytes; the receiver scatters the row into any free page. A page keeps its bytes
and changes its number. vLLM: `nixl_connector.py` in `distributed/kv_transfer/kv_connector/v1/` registers the tensors
and lets the network card gather; SGLang: `KVArgs.kv_data_ptrs` and `kv_item_lens` in `disaggregation/base/conn.py`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError, shown
from m3_paged_attention.kv_storage import KVStorage
from m6_multimodal_pd.errors import TransferError


class PageStore:
    """The pages of one engine: the model's KV and, at the same page numbers, the draft model's.

    It keeps the tensors alive: to release KV memory, drop the store as well.
    """

    def __init__(self, storages: Sequence[KVStorage]) -> None:
        """Raises `ConfigError` unless all storages have the same number of pages."""
        counts = [storage.config.num_blocks for storage in storages]
        if len(set(counts)) != 1:
            raise ConfigError(f"pages that go together need storages of as many pages each, not {shown(counts)}")
        self.num_pages = counts[0]
        """Pages that requests may have: 1 to `num_pages`. Page 0 is never allocated."""
        self.layout = " + ".join(_layout(storage.blocks) for storage in storages)
        """Meaning of the bytes of a page. Only engines with equal layouts may exchange pages."""
        memories = [storage.blocks.flatten(2).view(torch.uint8) for storage in storages]  # [tensors, pages, bytes]
        # Numbers of 8 bytes are copied several times faster than bytes; only very small models have none.
        self._unit = torch.uint8 if any(memory.shape[2] % 8 for memory in memories) else torch.int64
        self._memories = [memory.view(self._unit).transpose(0, 1) for memory in memories]  # [pages, tensors, units]
        self._widths = [memory[0].numel() for memory in self._memories]
        self.page_bytes = sum(self._widths) * self._unit.itemsize
        """Size of a page in all storages: the width of a row."""

    def check_pages(self, pages: Sequence[int]) -> None:
        """Raise `TransferError` unless all these pages exist, may be allocated, and are named once."""
        wrong = [page for page in pages if not 0 < page <= self.num_pages]
        if wrong:
            raise TransferError(f"there are no pages {shown(wrong)} to be moved, only 1 to {self.num_pages}")
        if len(set(pages)) != len(pages):
            raise TransferError(f"pages {shown(list(pages))}: one of them is named twice")

    @torch.inference_mode()
    def read(self, pages: Sequence[int], rows: Tensor) -> None:
        """Copy these pages into `rows`, uint8 `[len(pages), page_bytes]` on the CPU.

        The kernels that compute the KV must have ended, or be earlier on the same CUDA stream. Raises `TransferError`
        for a page that cannot be moved.
        """
        self.check_pages(pages)
        for memory, index, part in self._parts(pages, rows):
            if memory.device == part.device:
                torch.index_select(memory, 0, index, out=part)
            else:
                part.copy_(memory.index_select(0, index))  # gathered on the device, then copied in one piece

    @torch.inference_mode()
    def write(self, pages: Sequence[int], rows: Tensor) -> None:
        """Copy `rows`, as `read` made them, into these pages. Raises `TransferError` before anything is written."""
        self.check_pages(pages)
        for memory, index, part in self._parts(pages, rows):
            memory.index_copy_(0, index, part.to(memory.device))

    def _parts(self, pages: Sequence[int], rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each storage, the page numbers on its device, and its share of the rows: `[len(pages), tensors, units]`."""
        shares = torch.split(rows.view(self._unit), self._widths, dim=1)
        for memory, share in zip(self._memories, shares, strict=True):
            index = torch.tensor(pages, dtype=torch.int64, device=memory.device)
            yield memory, index, share.view(len(pages), *memory.shape[1:])


def _layout(blocks: Tensor) -> str:
    """Return `4 x [16, 2, 64] bfloat16`: number of tensors, shape of a page in each, and dtype."""
    return f"{len(blocks)} x {list(blocks.shape[2:])} {str(blocks.dtype).removeprefix('torch.')}"
