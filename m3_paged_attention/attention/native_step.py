"""All layers of a step in one call of the `native` backend.

`layers.py` calls the backend eleven times per layer, and each call takes some microseconds of Python: in a small model,
most of a decode step. Here the pointers to weights, KV and working memory are written to a table once. A step adds the
pointers to its own inputs, and one C++ call (`native/layers.h`) computes the rest, with the same kernels in the same
order: bitwise the same numbers. On a GPU, a CUDA graph is the same idea. With experts, a call ends where torch chooses
them, once per sparse layer.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.native_library import INT, F, N, P
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.models.experts_config import ExpertsConfig

KV_TYPES = {torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""`KVType` of kv.h, for KV in another format than the model's."""
MOST_TOKENS = 512
"""Maximum tokens of a step in one call. In a larger one the arithmetic takes far longer than the calls."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class CLinear(ctypes.Structure):
    """`Linear` of layers.h; this and the other two structures have its fields in its order."""

    _fields_ = [*_fields(P, "packed bias"), *_fields(INT, "kind")]

    @classmethod
    def of(cls, linear: Any) -> "CLinear":
        """Return the row of a `NativeLinear`."""
        return cls(packed=linear.packed.data_ptr(), bias=_pointer(linear.bias), kind=linear.kind)


class CLayer(ctypes.Structure):
    """`Layer` of layers.h."""

    _fields_ = [
        *_fields(P, "input_norm qk_norm post_attention_norm"),
        *_fields(CLinear, "qkv o gate_up down router"),
        *_fields(P, "keys values"),
    ]


class CStep(ctypes.Structure):
    """`Step` of layers.h."""

    _fields_ = [
        *_fields(N, "num_layers hidden_size heads kv_heads head_dim intermediate_size block_size kv_type"),
        *_fields(N, "num_experts top_k expert_width"),
        *_fields(F, "eps scale"),
        *_fields(P, "embedding norm cos sin layers"),
        *_fields(N, "num_tokens num_prefill_tokens num_prefills num_decodes table_stride"),
        *_fields(INT, "threads"),
        *_fields(P, "input_ids positions slots starts lengths tables output work angles"),
        *_fields(N, "layer"),
        *_fields(P, "logits of_experts experts expert_weights"),
    ]


class NativeStep:
    """The layers of one model over one KV memory, as one call. The table points into both."""

    def __init__(self, run_layers: Callable[[int], None], model: Any, kv: KVStorage) -> None:
        """`model`: a `Decoder` whose layers the kernels compute completely (`NativeBackend.step`)."""
        config = model.config
        self.model = model
        self.run_layers = run_layers
        self._known = list(model.layers)
        sparse = () if config.experts is None else config.experts.layers
        layers = [_layer(layer, index in sparse, *kv.layer(index)[:2]) for index, layer in enumerate(model.layers)]
        self._layers = (CLayer * len(layers))(*layers)
        self.table = CStep(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            block_size=kv.config.spec.block_size,
            kv_type=kv_type(kv.layer(0), model.dtype),
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            embedding=model.embedding.data_ptr(),
            norm=model.norm.data_ptr(),
            cos=model.rotary.cos.data_ptr(),
            sin=model.rotary.sin.data_ptr(),
            layers=ctypes.addressof(self._layers),
        )
        # working memory, which `run_layers` of layers.h divides; a part that no step has used takes no memory
        heads = 3 * config.num_heads + 3 * config.num_kv_heads  # Q, K, V; Q and K normed; the attended values
        width = 3 * config.hidden_size + heads * config.head_dim + 3 * config.intermediate_size
        self._work = torch.empty(MOST_TOKENS * width, dtype=model.dtype)
        self._angles = torch.empty(MOST_TOKENS * config.head_dim)
        self._output = torch.empty(MOST_TOKENS, config.hidden_size, dtype=model.dtype)
        self._outputs: dict[int, Tensor] = {}  # its first rows, by number: to allocate them takes a tenth of the Python
        self.table.work, self.table.angles = self._work.data_ptr(), self._angles.data_ptr()
        if config.experts is not None:
            self._add_experts(config.experts)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Return whether this is such a step: not too large, and of the layers in the table."""
        num_tokens = metadata.num_prefill_tokens + metadata.num_decodes
        return num_tokens <= MOST_TOKENS and self._known == self.model.layers

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the hidden states `[num_tokens, hidden_size]` after the last norm, in memory of the next call.

        `input_ids` and `positions` are int64 `[num_tokens]`.
        """
        input_ids, positions, table = input_ids.contiguous(), positions.contiguous(), self.table
        num_tokens = input_ids.shape[0]
        output = self._outputs.get(num_tokens)
        if output is None:
            output = self._outputs[num_tokens] = self._output[:num_tokens]
        self.fill(input_ids, positions, metadata, output)
        self.run_layers(ctypes.addressof(table))
        while table.num_experts and table.layer < table.num_layers:
            mlp = self.model.layers[table.layer].mlp
            experts, weights = mlp.choose(self._logits[:num_tokens])
            table.experts, table.expert_weights = experts.data_ptr(), weights.data_ptr()
            self.run_layers(ctypes.addressof(table))
        return output

    def fill(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, output: Tensor) -> None:
        """Write the pointers to the inputs and the output of a step to the table, all contiguous.

        `output` `[num_tokens, hidden_size]` is what `run_layers` writes; the caller keeps all of them until then.
        """
        tables, table = metadata.block_tables, self.table
        table.num_tokens, table.num_prefill_tokens = output.shape[0], metadata.num_prefill_tokens
        table.num_prefills, table.num_decodes = metadata.num_prefills, metadata.num_decodes
        table.table_stride, table.threads = tables.stride(0), torch.get_num_threads()
        table.input_ids, table.positions = input_ids.data_ptr(), positions.data_ptr()
        table.slots, table.starts = metadata.slot_mapping.data_ptr(), metadata.query_start_loc.data_ptr()
        table.lengths, table.tables = metadata.seq_lens.data_ptr(), tables.data_ptr()
        table.output, table.layer = output.data_ptr(), -1

    def _add_experts(self, config: ExpertsConfig) -> None:
        """Write the sizes and the memory of experts to the table."""
        table, pairs = self.table, MOST_TOKENS * config.top_k
        table.num_experts, table.top_k, table.expert_width = config.num_experts, config.top_k, config.intermediate_size
        self._logits = torch.empty(MOST_TOKENS, config.num_experts, dtype=self.model.dtype)
        self._of_experts = torch.empty(pairs * (2 * table.hidden_size + table.expert_width), dtype=self.model.dtype)
        table.logits, table.of_experts = self._logits.data_ptr(), self._of_experts.data_ptr()


def kv_type(layer: KVLayer, dtype: torch.dtype) -> int:
    """Return the format of a layer's KV for the kernels of a model of `dtype`; 0 is its own."""
    found = layer.key_cache.dtype
    return 0 if found == dtype else KV_TYPES[found]


def _layer(layer: Any, is_sparse: bool, keys: Tensor, values: Tensor) -> CLayer:
    """Return the table's row of a `DecoderLayer`."""
    attention, mlp = layer.attention, layer.mlp
    if is_sparse:
        panels = {"gate_up": mlp.experts.gate_up, "down": mlp.experts.down}
        of_mlp = {name: CLinear(packed=each.packed.data_ptr(), kind=each.kind) for name, each in panels.items()}
        of_mlp["router"] = CLinear.of(mlp.router)
    else:
        of_mlp = {"gate_up": CLinear.of(mlp.gate_up_proj), "down": CLinear.of(mlp.down_proj)}
    return CLayer(
        input_norm=layer.input_norm.data_ptr(),
        qk_norm=_pointer(attention.qk_norm),
        post_attention_norm=layer.post_attention_norm.data_ptr(),
        qkv=CLinear.of(attention.qkv_proj),
        o=CLinear.of(attention.o_proj),
        **of_mlp,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
