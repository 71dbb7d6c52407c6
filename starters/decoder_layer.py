"""Build a layer of m3's decoder: attention over KV in blocks, and an MLP. Qwen3, Qwen2 and Llama are a stack of these.

The products, norms and kernels are given; the layer decides their order, and what is added to what. There is one
residual through the whole model, and the sum with it and the norm after it are one operation. So a layer does not add
its last output: it returns it, and the next layer adds it. The order has traps: a key is normed, then turned by its
position, then stored, and only then read.

Explained in docs/m3_model.md#decoder-our-own-model.

    cp starters/decoder_layer.py my_layer.py
    pytest --part decoder_layer=my_layer.py:MyDecoderLayer
"""

from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.layers import MLP
from m3_paged_attention.models.weights import LayerWeights


class MyAttention:
    """Self-attention of the step's tokens over the KV in their requests' blocks."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        """Given."""
        self.backend, self.eps = backend, config.rms_norm_eps
        self.qkv_proj = backend.linear(weights.qkv, weights.qkv_bias)
        self.o_proj = backend.linear(weights.o, weights.o_bias)
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, layer: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """Write the new keys and values to `layer`, then attend. `hidden` and the result are `[tokens, hidden_size]`.

        - `self.qkv_proj(hidden)` is `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: all heads of Q, then those
          of K, then those of V.
        - `self.q_norm` and `self.k_norm` `[head_dim]` are weights of a norm that each head of Q and of K has before it
          is turned: `self.backend.rms_norm(heads, weight, self.eps)`. Both are None in a model without this norm.
        - `self.backend.rotary(heads, cos, sin)` returns heads, of Q or K or both, turned by the positions of the
          tokens.
        - `self.backend.store_kv(key, value, layer, metadata.slot_mapping)` writes K, turned, and V, as it is, to the
          slots of the new tokens.
        - `self.backend.attention(query, layer, metadata, self.scale)` returns `[tokens, num_heads, head_dim]`. It reads
          all keys and values in `layer`, those of the new tokens, too.
        - `self.o_proj` takes the heads of a token side by side.

        Here heads are tensors `[tokens, any number of heads, head_dim]`. A backend may write a result over its
        argument, or leave the argument as it is: use what it returns.
        """
        raise NotImplementedError


class MyDecoderLayer:
    """Attention and MLP, each after a norm, with a separate residual."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        """Given."""
        self.backend, self.eps = backend, config.rms_norm_eps
        self.input_norm = weights.input_norm
        self.post_attention_norm = weights.post_attention_norm
        self.attention = MyAttention(config, weights, backend)
        self.mlp = MLP(weights, backend)

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP, and the residual that it has not been added to. Both `[tokens, hidden_size]`.

        `residual` is the sum of the embedding and of all outputs of attention and MLP so far, except the last one,
        `hidden`: the output of the MLP of the layer before. In the first layer `residual` is None, and `hidden` is the
        embedding. Both may be overwritten.

        Attention reads the norm of the sum, with the weight `input_norm`. Its output is added to the sum. The MLP,
        `self.mlp(hidden)`, reads the norm of this new sum, with the weight `post_attention_norm`.

        `self.backend.rms_norm(x, weight, self.eps)` returns a norm. `self.backend.add_rms_norm(x, residual, weight,
        self.eps)` returns the norm of `x + residual`, and the sum, which may overwrite `residual`.

        Begin here: as long as attention returns `torch.zeros_like(hidden)`, you can pass the first three behaviours.
        Numbers may differ from the exact ones by 2e-5.
        """
        raise NotImplementedError
