"""Writes what stands beside the checkpoint that sees: its model card and its loss curve."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from training.card import draw_losses, sha256, shape
from training.evaluate import MAY_FORGET
from training.scenes import BACKGROUNDS, CELLS, COLORS, MOTIONS, PICTURE_SIZES, SHAPES, SIZES
from training.scoring import Score, summary
from training.vision_checkpoint import IMAGE_PROCESSOR, VIDEO_PROCESSOR

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# tiny-qwen3-vl

tiny-qwen3, having learned to see: a real `Qwen3VLForConditionalGeneration` of {parameters:.1f} M parameters that was trained
on a CPU to ship with Stepwise, so that images and video in an LLM engine can be learned, tested and measured on a
laptop, without a download. It sees scenes that `training/scenes.py` draws, and it still has the skills of tiny-qwen3.

| skill | what it does | exactly right |
|---|---|---|
{rows}

| skill of tiny-qwen3 | tiny-qwen3 has right | this model has right |
|---|---|---|
{text_rows}

Measured by `python -m training.evaluate`: greedy generation with transformers on the saved bf16 file (computed in
fp32), on scenes, lists and texts drawn from seeds that training does not use; the whole answer must be right. Pictures
go through the image processor and the chat template that lie beside this card. The text skills may be at most
{may_forget:.0f} points below those of tiny-qwen3.

## What it sees

- **A picture** is {sizes} pixels, plain ({backgrounds} light backgrounds), and shows one to four things. A thing is small or big
  ({small}; {big} of its cell), has one of {num_colors} colours ({colors}) and one of {num_shapes} shapes ({shapes}), and lies
  in one of nine cells: {cells}.
- **Two pictures** show one thing each. From the first to the second its colour, shape, size or position changes, or nothing does.
- **A clip** has four to eight frames of 96x96, two a second. One thing moves ({ways}) across most of the picture, or
  stays still.

It is asked "Describe the picture.", "What is at the top left?", "What color is the star?", "Where is the red circle?",
"How many blue shapes are there?", "What changed?", "Which picture shows a star?", "Describe the second picture.",
"What happens in the clip?", "Which way does the square move?", in few wordings. A description names the things in
reading order: "At the top left a big red circle, at the center a small blue star."

## What it is

| | |
|---|---|
| layers, hidden size, MLP size | {layers}, {hidden}, {mlp} |
| query heads, KV heads, head_dim | {heads}, {kv_heads}, {head_dim} (grouped-query attention) |
| M-RoPE | interleaved, sections {sections} (time, height, width), theta {theta:,.0f} |
| vision tower | {v_layers} layers of {v_hidden}, MLP {v_mlp}, {v_heads} heads; {v_positions} learned positions; {v_parameters:.1f} M parameters |
| patches | {patch}x{patch} pixels of {frames} frames; {merge}x{merge} patches become one token: a 96x96 picture is 9 tokens |
| DeepStack | from vision layers {deepstack}, into the first {num_deepstack} layers of the decoder |
| pixels | a picture of {min_pixels:,} to {max_pixels:,}, or it is resized; of a clip at most {max_frames} frames, {fps} a second |
| vocabulary | {vocab} tokens, those of tiny-qwen3; embeddings tied to the head |
| context | {context} positions; trained on dialogues of up to about 900 tokens |
| weights | {size:.1f} MB bf16, sha256 `{sha256}` |
| descends from | tiny-qwen3, sha256 `{text_sha256}` |

## How it was made

`python -m training.tiny_qwen3_vl`: first the vision tower learns alone, for {tower_steps:,} steps of {tower_pictures} pictures, what lies in each square of
32x32 pixels: the embedding of a square must be near to those of the words for size, colour, shape and place of the thing whose middle is there. Then it stands before
tiny-qwen3, and both are trained together for {steps:,} steps (seed {seed}). A step is {dialogues} dialogues about freshly drawn pictures and clips,
and at least {text_tokens} tokens of what tiny-qwen3 read, so that it forgets nothing: {text_share:.0%} of the learned tokens are text. Muon for the matrices, AdamW for embeddings, norms, biases and the
patch filter, fp32. {minutes}

![loss curve](loss.png)

## What it cannot do

It has seen nothing but these drawings. A photograph, a drawing in another style, another colour, shape or language, overlapping
things, more than four of them or another picture size: it answers in the same words, confidently and wrong. It has read prompts
with one picture, with two, or with one clip, at the first question; more than that may work, and is not measured.
Like tiny-qwen3 it knows nothing about the world, and makes up an answer for a question that it was not taught.
"""

WHAT = {
    "describe": "names everything in a picture",
    "what": "says what is at a place, and of what colour something is",
    "where": "says where something is, or that it is not there",
    "how many": "counts all things, those of a colour, those of a shape",
    "compare": "says what changed between two pictures, which of them shows something, what one of them shows",
    "motion": "says what moves in a clip, and which way",
}


def write_vision_card(
    path: Path,
    text_path: Path,
    *,
    model: PreTrainedModel,
    losses: Sequence[float],
    scores: Sequence[Score],
    text_scores: Sequence[Score],
    recipe: dict[str, object],
) -> None:
    """Write `README.md` and `loss.png` into the checkpoint directory `path`.

    `text_scores` are those of the text model in `text_path`; `recipe` says how the run went.
    """
    draw_losses(losses, path / "loss.png")
    weights = path / "model.safetensors"
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        rows="\n".join(_row(total, scores) for total in summary(scores) if total.skill in WHAT),
        text_rows="\n".join(_text_row(total, scores) for total in summary(text_scores)),
        may_forget=100 * MAY_FORGET,
        size=weights.stat().st_size / 1e6,
        sha256=sha256(weights),
        text_sha256=sha256(text_path / "model.safetensors"),
        steps=len(losses),
        v_parameters=model.model.visual.num_parameters() / 1e6,
        **_drawn(),
        **_tower(model.config),
        **shape(model.config.text_config),
        **recipe,
    )
    (path / "README.md").write_text(card, encoding="utf-8")


def _drawn() -> dict[str, object]:
    """What `training/scenes.py` draws, in words."""
    return {
        "sizes": " or ".join(f"{width}x{height}" for width, height in dict.fromkeys(PICTURE_SIZES)),
        "backgrounds": len(BACKGROUNDS),
        **{size: f"{2 * low:.0%} to {2 * high:.0%}" for size, (low, high) in SIZES.items()},
        "num_colors": len(COLORS),
        "colors": ", ".join(COLORS),
        "num_shapes": len(SHAPES),
        "shapes": ", ".join(SHAPES),
        "cells": ", ".join(CELLS),
        "ways": ", ".join(motion for motion in MOTIONS if motion != "still"),
    }


def _tower(config: PreTrainedConfig) -> dict[str, object]:
    vision, rope = config.vision_config, config.text_config.rope_parameters
    return {
        "sections": rope["mrope_section"],
        "theta": rope["rope_theta"],
        "v_layers": vision.depth,
        "v_hidden": vision.hidden_size,
        "v_mlp": vision.intermediate_size,
        "v_heads": vision.num_heads,
        "v_positions": vision.num_position_embeddings,
        "patch": vision.patch_size,
        "frames": vision.temporal_patch_size,
        "merge": vision.spatial_merge_size,
        "deepstack": " and ".join(map(str, vision.deepstack_visual_indexes)),
        "num_deepstack": len(vision.deepstack_visual_indexes),
        "min_pixels": IMAGE_PROCESSOR["size"]["shortest_edge"],
        "max_pixels": IMAGE_PROCESSOR["size"]["longest_edge"],
        "max_frames": VIDEO_PROCESSOR["max_frames"],
        "fps": VIDEO_PROCESSOR["fps"],
    }


def _right(score: Score) -> str:
    return f"{score.right}/{score.total} = {score.share:.1%}"


def _row(total: Score, scores: Sequence[Score]) -> str:
    """A skill; where it has kinds of questions, those too."""
    kinds = [score for score in scores if score.skill == total.skill]
    parts = "; ".join(f"{score.size}: {score.share:.1%}" for score in kinds)
    what = f"{WHAT[total.skill]} ({parts})" if len(kinds) > 1 else WHAT[total.skill]
    return f"| {total.skill} | {what} | {_right(total)} |"


def _text_row(text: Score, scores: Sequence[Score]) -> str:
    [own] = [total for total in summary(scores) if total.skill == text.skill]
    return f"| {text.skill} | {_right(text)} | {_right(own)} |"
