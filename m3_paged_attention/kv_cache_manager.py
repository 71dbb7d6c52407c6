"""KV cache manager: the block table of each request, as block ids without tensors.

m2 gave a request one slot for the longest possible request. Here a request gets blocks of a few tokens, anywhere in
memory, and one more whenever the last is full:

    request a   tokens 0-15 in block 7, 16-31 in block 2, 32-33 in block 9        block_ids  [7, 2, 9]
    slot of token 33 = block_ids[33 // 16] * 16 + 33 % 16 = 9 * 16 + 1

The table makes three things possible. A request that needs room takes any free block. Requests may share blocks
(`fork`); one that writes into a shared block gets a copy of it first (copy on write). And a request may be moved to
host memory and back to other blocks (`swap_out`, `swap_in`). The manager only notes moves of data; the model runner
makes them before the forward.

vLLM: `v1/core/kv_cache_manager.py`, and for fork, swap and copy the `BlockSpaceManager` of its first engine; SGLang:
`mem_cache/allocator.py`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from m1_single_request.tracer import Tracer
from m3_paged_attention.block_pool import BlockMoves, BlockPool, BlockUsage, blocks_for
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.kv_events import BlockCopied, BlocksAllocated, BlocksForked, BlocksFreed, BlocksSwapped


class BlockTable:
    """The blocks of one request."""

    __slots__ = ("block_ids", "on_host", "room")

    def __init__(self, block_ids: list[int], *, room: int = 0, on_host: bool = False) -> None:
        self.block_ids = block_ids
        """Block ids in the order of the request's tokens; host blocks if `on_host`."""
        self.room = room
        """Number of tokens that need no other block. A fork sets it to 0, so that `reserve` checks for sharing."""
        self.on_host = on_host


class KVCacheManager:
    """Allocates blocks on demand: shared by forks, copied on write, swapped to the host.

    The result of `can_hold` is valid for the next `reserve` only.
    """

    def __init__(self, *, kv_cache_config: KVCacheConfig, tracer: Tracer) -> None:
        self.block_size = kv_cache_config.spec.block_size
        self.num_blocks = kv_cache_config.num_blocks
        self.num_host_blocks = kv_cache_config.num_host_blocks
        self.tracer = tracer
        self.reset()

    def reset(self) -> None:
        """Free all blocks, and drop noted moves."""
        self.pool = BlockPool(self.num_blocks)
        self.host_pool = BlockPool(self.num_host_blocks, first_id=0)
        self._tables: dict[str, BlockTable] = {}  # by request id; a block in no table is free
        self._taken: frozenset[str] = frozenset()  # owners of the data in the moves taken last
        self._forget_moves()

    @property
    def num_free(self) -> int:
        """Number of free blocks on the device."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, rounded up."""
        return blocks_for(num_tokens, self.block_size)

    # --- room for tokens ----------------------------------------------------------------------------------------------

    def num_needed(self, request_id: str, num_tokens: int) -> int:
        """Return the number of free blocks that the request needs for `num_tokens` tokens in total. For a swapped
        request this includes the blocks to swap it in."""
        table = self._tables.get(request_id)
        if table is None:
            return self.blocks_for(num_tokens)
        if num_tokens <= table.room:  # the usual case, for every running request in every step
            return 0
        last = (num_tokens - 1) // self.block_size  # the block with the token to be written
        if table.on_host:
            return max(last + 1, len(table.block_ids))
        if last >= len(table.block_ids):
            return last + 1 - len(table.block_ids)
        return int(self.pool.ref_count(table.block_ids[last]) > 1)

    def num_needed_together(self, lengths: Iterable[tuple[str, int]]) -> int:
        """Return the same for several running requests, by (request id, number of tokens).

        It may be less than the sum. Example: two requests share a block, and both write into it. The first one needs a
        copy; then the block is no longer shared, and the second one writes into it.
        """
        num_needed, writers = 0, Counter[int]()
        for request_id, num_tokens in lengths:
            block_ids, last = self._tables[request_id].block_ids, (num_tokens - 1) // self.block_size
            num_needed += max(0, last + 1 - len(block_ids))
            writers.update(block_ids[last : last + 1])
        return num_needed + sum(min(count, self.pool.ref_count(b) - 1) for b, count in writers.items())

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        """Return whether its blocks and the free ones suffice for `num_tokens` tokens of the request in total."""
        return self.num_needed(request_id, num_tokens) <= self.pool.num_free

    def in_need(self, lengths: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those of these (request id, number of tokens) for which `reserve` may take a block, in order."""
        tables = self._tables
        return [one for one in lengths if one[1] > tables[one[0]].room]

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        """Allocate blocks for `num_tokens` tokens of the request in total; return the new ones. Raises
        `OutOfBlocksError`, and then changes nothing.

        A request that already owns blocks writes one token next, at position `num_tokens - 1`. If the block of this
        position is shared, a new block replaces it in the table and the copy is noted; if the table has no block of
        this position, new blocks are appended. In both cases the last new id is at index `(num_tokens - 1) //
        block_size` of the table.
        """
        table = self._tables.get(request_id)
        if table is None:
            table = BlockTable([])
        elif num_tokens <= table.room:
            return []
        assert not table.on_host, f"{request_id} must be swapped in first"
        block_ids, last = table.block_ids, (num_tokens - 1) // self.block_size
        if last < len(block_ids):
            new_ids = self._copy_on_write(request_id, block_ids, last)
        else:
            new_ids = self.pool.allocate(last + 1 - len(block_ids))
            block_ids.extend(new_ids)
            self._tables[request_id] = table
            self.tracer.emit(
                BlocksAllocated,
                owner=request_id,
                block_ids=tuple(new_ids),
                num_tokens=num_tokens,
                num_owned=len(block_ids),
                num_free=self.pool.num_free,
            )
        table.room = (last + 1) * self.block_size  # to the end of this block, which is not shared now
        return new_ids

    def _copy_on_write(self, request_id: str, block_ids: list[int], index: int) -> list[int]:
        """Replace the block at `index` by a copy if other requests hold it, too. Return the new block, if any."""
        source = block_ids[index]
        if self.pool.ref_count(source) == 1:  # no other request holds it any more
            return []
        new_ids = self.pool.allocate(1)
        self._copies[new_ids[0]] = self._copies.get(source, source)  # the source itself may be a copy of this step
        block_ids[index] = new_ids[0]
        self.pool.free([source])
        holders, free = self.pool.ref_count(source), self.pool.num_free
        self.tracer.emit(
            BlockCopied, owner=request_id, source=source, target=new_ids[0], num_holders=holders, num_free=free
        )
        return new_ids

    # --- sharing, and giving back -------------------------------------------------------------------------------------

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Share the blocks of the first `num_tokens` tokens of a request with a new request."""
        parent, count = self._tables[parent_id], self.blocks_for(num_tokens)
        assert child_id not in self._tables, f"{child_id} owns blocks already"
        assert not parent.on_host and count <= len(parent.block_ids), f"{parent_id} has not {num_tokens} tokens here"
        shared = parent.block_ids[:count]
        parent.room = 0  # its last block may be shared now: before its next token `reserve` must check that
        self.pool.share(shared)
        self._tables[child_id] = BlockTable(shared)
        block_ids = tuple(shared)
        self.tracer.emit(BlocksForked, owner=child_id, parent=parent_id, block_ids=block_ids, num_tokens=num_tokens)

    def release(self, request_id: str) -> None:
        """Free the blocks of the request, if it has any."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        freed = self._free(table)
        if table.block_ids:
            self.tracer.emit(
                BlocksFreed,
                owner=request_id,
                block_ids=tuple(freed),
                num_kept=len(table.block_ids) - len(freed),
                on_host=table.on_host,
                num_free=(self.host_pool if table.on_host else self.pool).num_free,
            )

    def _free(self, table: BlockTable) -> list[int]:
        """Free a table's blocks; drop the noted moves whose targets are free now."""
        pool, noted = (self.host_pool, self._swap_outs) if table.on_host else (self.pool, self._copies)
        freed = pool.free(table.block_ids)
        if noted:
            for block_id in freed:
                noted.pop(block_id, None)
        return freed

    # --- swapping -----------------------------------------------------------------------------------------------------

    def swap_out(self, request_id: str) -> bool:
        """Move a request to host memory. Return False, and change nothing, if the host has too few free blocks.

        Blocks that other requests share are copied, and theirs stay.
        """
        table = self._tables[request_id]
        assert not table.on_host, f"{request_id} is on the host already"
        if len(table.block_ids) > self.host_pool.num_free:
            return False
        host_ids = self.host_pool.allocate(len(table.block_ids))
        for block_id, host_id in zip(table.block_ids, host_ids, strict=True):
            self._swap_outs[host_id] = self._copies.get(block_id, block_id)  # a copy of this step: its source
        self._tables[request_id] = BlockTable(host_ids, on_host=True)
        self._free(table)
        self._trace_swap(request_id, "out", table.block_ids, host_ids)
        return True

    def swap_in(self, request_id: str) -> None:
        """Move a swapped request back to the device. Raises `OutOfBlocksError`, and then changes nothing.

        Only before another request is swapped out in the same step: swaps in are made first.
        """
        table = self._tables[request_id]
        assert table.on_host, f"{request_id} is not on the host"
        block_ids = self.pool.allocate(len(table.block_ids))
        read_later = {*self._swap_outs.values(), *self._copies.values()}
        assert read_later.isdisjoint(block_ids) and self._swap_outs.keys().isdisjoint(table.block_ids), (
            f"{request_id} would overwrite blocks to be read: swap in before others are swapped out"
        )
        self._swap_ins.update(zip(block_ids, table.block_ids, strict=True))
        self._tables[request_id] = BlockTable(block_ids, room=len(block_ids) * self.block_size)
        self._free(table)
        self._trace_swap(request_id, "in", block_ids, table.block_ids)

    def _trace_swap(self, request_id: str, direction: str, block_ids: list[int], host_block_ids: list[int]) -> None:
        self.tracer.emit(
            BlocksSwapped,
            owner=request_id,
            direction=direction,
            block_ids=tuple(block_ids),
            host_block_ids=tuple(host_block_ids),
            num_free=self.pool.num_free,
            num_host_free=self.host_pool.num_free,
        )

    def is_swapped(self, request_id: str) -> bool:
        """Return whether the blocks of the request are on the host."""
        table = self._tables.get(request_id)
        return table is not None and table.on_host

    # --- moves --------------------------------------------------------------------------------------------------------

    def take_moves(self) -> BlockMoves:
        """Return the moves noted since the last call, to be made now. The next call implies that they were made."""
        if not (self._swap_ins or self._swap_outs or self._copies):
            self._taken = frozenset()
            return BlockMoves([], [], [])
        self._taken = self._owners_of_moves()
        moves = BlockMoves(
            swap_in=[(host_id, block_id) for block_id, host_id in self._swap_ins.items()],
            swap_out=[(block_id, host_id) for host_id, block_id in self._swap_outs.items()],
            copies=[(source, target) for target, source in self._copies.items()],
        )
        self._forget_moves()
        return moves

    def touched(self) -> frozenset[str]:
        """Return the owners of data in moves that are noted or were taken last: if the step fails, it may be lost."""
        return self._taken | self._owners_of_moves()

    def _owners_of_moves(self) -> frozenset[str]:
        """Return the requests that own the target of a noted move; forked children may own it, too."""
        on_device, on_host = self._swap_ins.keys() | self._copies.keys(), self._swap_outs.keys()
        return frozenset(
            request_id
            for request_id, table in self._tables.items()
            if not (on_host if table.on_host else on_device).isdisjoint(table.block_ids)
        )

    def _forget_moves(self) -> None:
        self._swap_ins: dict[int, int] = {}  # noted moves, {target: source}: a target has one source only
        self._swap_outs: dict[int, int] = {}
        self._copies: dict[int, int] = {}

    # --- state --------------------------------------------------------------------------------------------------------

    def block_ids(self, request_id: str) -> list[int]:
        """Return all blocks of the request, in the order of its tokens."""
        return list(self._tables[request_id].block_ids)

    def owned(self) -> Mapping[str, list[int]]:
        """Return the device blocks by request id."""
        return {request_id: list(t.block_ids) for request_id, t in self._tables.items() if not t.on_host}

    def swapped(self) -> Mapping[str, list[int]]:
        """Return the host blocks of swapped requests by request id."""
        return {request_id: list(t.block_ids) for request_id, t in self._tables.items() if t.on_host}

    def usage(self) -> BlockUsage:
        """Return the numbers of free, used and shared device blocks."""
        num_free = self.pool.num_free
        return BlockUsage(self.num_blocks, num_free, self.num_blocks - num_free, self.pool.num_shared)

    def num_tokens_held(self, lengths: Mapping[str, int]) -> int:
        """Return the number of slots that hold a token; a shared slot counts once. `lengths`: computed tokens by
        request id."""
        tables = [(t, lengths[r]) for r, t in self._tables.items() if r in lengths and not t.on_host]
        if not self.pool.num_shared:
            return sum(min(length, len(table.block_ids) * self.block_size) for table, length in tables)
        held: dict[int, int] = {}  # block id -> most tokens that one of its holders has in it
        for table, length in tables:
            for block_id, first in zip(table.block_ids, range(0, length, self.block_size), strict=False):
                held[block_id] = max(held.get(block_id, 0), min(length - first, self.block_size))
        return sum(held.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if blocks and tables contradict each other."""
        tables = {False: dict[str, BlockTable](), True: dict[str, BlockTable]()}
        for request_id, table in self._tables.items():
            tables[table.on_host][request_id] = table
            assert len(set(table.block_ids)) == len(table.block_ids), f"{request_id}: {table.block_ids}"
        for on_host, pool in ((False, self.pool), (True, self.host_pool)):
            pool.check_invariants(Counter(b for table in tables[on_host].values() for b in table.block_ids))
        for request_id, table in tables[False].items():
            own = table.block_ids[table.room // self.block_size - 1 :][:1] if table.room else []
            assert table.room <= len(table.block_ids) * self.block_size, f"{request_id} has room {table.room}"
            assert all(self.pool.ref_count(b) == 1 for b in own), f"{request_id} may write into a shared block"
        index_of: dict[int, int] = {}
        for table in tables[False].values():  # only a common prefix is shared
            assert all(index_of.setdefault(block_id, i) == i for i, block_id in enumerate(table.block_ids)), index_of
