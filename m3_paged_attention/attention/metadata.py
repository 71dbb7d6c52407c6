"""Where the tokens of a flat batch belong: which rows, which positions, which slots of the KV memory.

m2's batch was a padded rectangle, and a mask said what was padding. Here the tokens of all requests stand one after
another in a single row of `total_tokens`, and this object says where one request ends and the next begins:

    tokens           | a a a a a | b b | c | d |      two prefills, two decodes
    query_start_loc    0           5     7   8   9
    context_lens       0           0     30  8        tokens with KV from earlier steps
    seq_lens           5           2     31  9        those and the new ones

Rows with several new tokens come first, rows with exactly one after them, because attention treats the two kinds
differently. (A single token among the first is right, too, and only slower.) vLLM: `CommonAttentionMetadata`
(`v1/attention/backends/utils.py`); SGLang keeps the same numbers in `ForwardBatch`.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's layout. Tensors are on the model's device; the tuples are the same numbers on the host.

    Made anew for every step and never changed: a backend may plan once for the object and go by it in every layer.
    """

    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]
    context_lens: Tensor  # int32 [num_seqs]
    query_lens: Tensor  # int32 [num_seqs]
    block_tables: Tensor  # int32 [num_seqs, max_blocks]; unused entries point at block 0
    slot_mapping: Tensor  # int64 [total_tokens]: block id * block_size + offset; padding points into block 0
    num_prefills: int
    """Rows with more than one new token; they come first."""
    num_prefill_tokens: int
    num_decodes: int
    """Rows with exactly one."""
    num_decode_tokens: int
    max_query_len: int
    max_seq_len: int
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]

    @property
    def num_seqs(self) -> int:
        return self.num_prefills + self.num_decodes
