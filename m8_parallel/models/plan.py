"""The dimension in which each weight of a decoder is cut, read from transformers' plan of the model's family.

A linear layer `y = x W^T` can be cut two ways. *By columns* (`colwise`): each rank has some rows of W, so it computes
some of the outputs, from all inputs. *By rows* (`rowwise`): each rank has some columns of W, so it needs some of the
inputs only, and what it computes is a part of the sum of every output: an all-reduce adds the parts up. (The names are
those of W^T.) An MLP is a `colwise` layer, an elementwise activation and a `rowwise` layer: the outputs that a rank has
are the inputs that it needs, and one all-reduce is enough. Attention is the same, with whole heads. Shoeybi et al.,
"Megatron-LM" (2019).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig, Qwen3Config

from m1_single_request.errors import ConfigError, shown

Cut = Literal["columns", "rows", "none"]
"""Which numbers of a stored weight a rank has: some of its rows (columns of W^T), some of its columns, or all."""
STYLES: Mapping[str, Cut] = {
    "colwise": "columns",
    "packed_colwise": "columns",  # gate and up in one tensor: each is cut
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "none",
    "moe_tp_experts": "none",  # of the module, whose weights have entries of their own
    "embedding_rowwise": "columns",  # rows of the table
}
EMBEDDINGS = {"embed_tokens": "columns", "lm_head": "columns"}
"""Not in the plans: each rank has the rows of some tokens."""


@dataclass(frozen=True)
class Plan:
    """The cut of each module of a decoder."""

    cuts: Mapping[str, Cut]
    """A pattern of module names, without the prefix of the decoder, -> its cut."""

    def cut_of(self, name: str) -> Cut:
        """Return the cut of a module by its name, such as `layers.3.mlp.down_proj`; norms and routers are whole."""
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if general.startswith("layers.*.mlp.experts.*."):  # one by one in the files, and stacked in the plan
            general = general.replace("experts.*.", "")
        return self.cuts.get(general, "none")


def plan_of(name: str, config: PreTrainedConfig) -> Plan:
    """Read the plan of a text config. Raises `ConfigError`, with the model's `name`, for a style that is not known."""
    found = dict(config.base_model_tp_plan or {})
    if not any(key.startswith("layers.") for key in found):
        found |= dict(Qwen3Config.base_model_tp_plan)  # Qwen3-VL is Qwen3, and its class has no plan
    unknown = {style for style in found.values() if style not in STYLES}
    if unknown:
        raise ConfigError(f"{name}: its layers are cut in a way that is not supported: {shown(min(unknown))}")
    return Plan({key: STYLES[style] for key, style in found.items()} | {key: "columns" for key in EMBEDDINGS})
