"""The files of a checkpoint that sees: weights and configuration, chat template, image and video processor.

What a Qwen3-VL repository holds, so that whatever loads one loads ours. A picture or a clip is one placeholder in the
chat template; whoever prepares the prompt makes as many of it as the vision tower makes embeddings.
"""

import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.evaluate import CHECKPOINT as TEXT_MODEL
from training.tiny_qwen3 import save_checkpoint
from training.vision_skills import MERGE, PATCH, TEMPORAL_PATCH

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # the text model's own
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception("unknown role '" ~ message.role ~ "': use system, user or assistant") }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content is undefined or message.content is mapping or message.content is not sequence %}
{{- raise_exception('the content of a message must be a text or a list of parts') }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' and part.text is string %}
{{- part.text }}
{%- elif part.type not in ['image', 'image_url', 'video', 'video_url'] %}
{{- raise_exception("no text and no known part: '" ~ part.type ~ "'; use text, image, image_url, video, video_url") }}
{%- elif message.role != 'user' %}
{{- raise_exception("role '" ~ message.role ~ "' cannot show a part of type '" ~ part.type ~ "': only user can") }}
{%- elif part.type in ['image', 'image_url'] %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_PATCHES = {
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL_PATCH,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
# Pixels of a picture: one of 96 x 96 is neither enlarged nor reduced. The names are the format's, nothing is an edge.
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    **_PATCHES,
}
# Pixels of all sampled frames together, and how many frames are sampled from a second, and at all.
VIDEO_PROCESSOR = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 16 * 256 * 256},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 16,
    **_PATCHES,
}


def save_vision_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the Hugging Face directory: bf16 weights, configurations, the text model's tokenizer, our template."""
    save_checkpoint(model, tokenizer, path)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TEXT_MODEL / name, path / name)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, config in (("preprocessor", IMAGE_PROCESSOR), ("video_preprocessor", VIDEO_PROCESSOR)):
        (path / f"{name}_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
