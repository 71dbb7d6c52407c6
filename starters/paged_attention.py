"""Build paged attention of m3 in plain torch: attention that reads keys and values through block tables.

The KV of a request is in blocks that are anywhere in memory, the last one is partly filled, and requests of all lengths
are in one step: some with one new token, some with a whole prompt. torch has no product that reads through a table, so
the blocks are copied side by side first. The difficult part is what must have no effect: KV behind the end of a
request, later tokens of the same prompt, rows that are padding.

Explained in docs/m3_model.md#the-torch-backend-gather-then-multiply.

    cp starters/paged_attention.py my_attention.py
    pytest --part paged_attention=my_attention.py:MyTorchBackend
"""

from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.kv_storage import KVLayer


class MyTorchBackend(TorchBackend):
    """The torch backend with attention of your own. Its other operations are given: the base class has them."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Return causal attention of the step's new tokens, `[tokens, heads, head_dim]`.

        It is contiguous, has the type of `query`, and may use memory that your next call overwrites. A loop over the
        rows, in plain torch, is fast enough here. All arguments are only read.

        `query` `[tokens, heads, head_dim]` has the new tokens of all rows (requests), one row behind the other. It is a
        view of a larger tensor, and not contiguous.

        `layer.key_cache` and `layer.value_cache`, both `[blocks, block_size, kv_heads, head_dim]`, are the memory of
        one layer, in the type of `query`. KV of the new tokens is there already. The token at position p of row r is in
        the block `metadata.block_tables[r, p // block_size]`, at index p % block_size of it. Other slots have anything,
        also NaN, and it must have no effect. The layer's two fields for scales are None.

        `metadata` of row r:

        - `query_lens_host[r]`: its number of new tokens, the last ones of the row; rows with several come first.
        - `seq_lens_host[r]`: its length, new tokens included. A row of length 0 is padding: it has one token in
          `query`, and its result is zeros.
        - `query_start_loc[r]`: index of its first token in `query`; the last entry is the number of tokens.
        - `block_tables[r]`, int32: its blocks in the order of its tokens, and zeros behind them.

        All layers of a step are called with the same `metadata` object, each with a `layer` of its own.

        Query head h reads KV head h // (heads // kv_heads). A new token at position p attends to the positions 0 to p
        of its row. The score of a position is (query · key) * `scale`, and its weight the softmax of the scores. They
        may be some hundreds. Your result may differ from the exact one by 1e-5, and by 1e-3 where scores are so large.
        """
        raise NotImplementedError
