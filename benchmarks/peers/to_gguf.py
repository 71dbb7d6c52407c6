"""Write a Qwen3 checkpoint as GGUF: `python to_gguf.py DIRECTORY FILE f32|bf16|q8_0`, in llama.cpp's environment.

Its vocabulary is for texts of answers alone: tokens that the tokenizer lacks are words, and prompts are token ids.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def name_of(name: str) -> str:
    """Return the name in GGUF of a tensor of the checkpoint."""
    module = name.removeprefix("model.").removesuffix(".weight")
    if module in TOP:
        return f"{TOP[module]}.weight"
    _, index, rest = module.split(".", 2)
    return f"blk.{index}.{LAYER[rest]}.weight"


def add_vocabulary(writer: gguf.GGUFWriter, directory: Path, size: int) -> None:
    """Write the tokens of the tokenizer, and words up to the size of the model's vocabulary."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = {number: name for name, number in (tokenizer["model"]["vocab"] | added).items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([names.get(number, f"\u0120word{number}") for number in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])


def main(directory: Path, path: Path, precision: str) -> None:
    """Write the file."""
    config = json.loads((directory / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[precision.upper()]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, directory, config["vocab_size"])
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                if key == "lm_head.weight" and config["tie_word_embeddings"]:
                    continue
                values: np.ndarray = tensors.get_tensor(key).float().numpy()
                stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
                writer.add_tensor(name_of(key), gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
