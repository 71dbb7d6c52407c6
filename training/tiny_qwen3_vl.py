"""Trains `m6_multimodal_pd/checkpoints/tiny-qwen3-vl`: `python -m training.tiny_qwen3_vl`.

tiny-qwen3 learns to see. First a vision tower learns alone what lies in the squares of a picture, in the words of tiny-
qwen3 (`vision_tower.py`); then both are trained together on dialogues, and go on reading text, so that nothing is
forgotten. Like the other runs, this one goes on where it stopped, and refuses to overwrite.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from training.evaluate import CHECKPOINT as TEXT_MODEL, evaluate
from training.evaluate_vision import CHECKPOINT
from training.loop import LoopConfig, Progressing, train
from training.scoring import summary
from training.tiny_qwen3 import duration, make_parser, may_write
from training.vision_card import write_vision_card
from training.vision_checkpoint import save_vision_checkpoint
from training.vision_recipe import SEED, TEXT_TOKENS, VISION_DIALOGUES, VisionRecipe
from training.vision_skills import IMAGE_PAD, MERGE, PATCH, TEMPORAL_PATCH, VIDEO_PAD, VISION_END, VISION_START
from training.vision_tower import PICTURES, STEPS as TOWER_STEPS, train_tower

RUN_DIR = Path(__file__).parent / "runs" / "tiny-qwen3-vl"
STEPS = 2400
TOWER: dict[str, Any] = {"matrix_lr": 0.02, "save_every": 50, "dtype": torch.float32}
LOOP: dict[str, Any] = {
    "matrix_lr": 0.005,
    "vector_lr": 5e-4,
    "decay_from": 0.2,
    "save_every": 50,
    "dtype": torch.float32,
}
MROPE_SECTION = [12, 10, 10]  # frequencies of a head that turn with time, height and width: all 32 of head_dim 64


def make_model(text: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL whose language model is `text`, and whose vision tower of 3 layers knows nothing yet."""
    torch.manual_seed(SEED)
    start, end, image, video = tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD])
    written = text.config
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": written.vocab_size,
            "hidden_size": written.hidden_size,
            "intermediate_size": written.intermediate_size,
            "num_hidden_layers": written.num_hidden_layers,
            "num_attention_heads": written.num_attention_heads,
            "num_key_value_heads": written.num_key_value_heads,
            "head_dim": written.head_dim,
            "max_position_embeddings": written.max_position_embeddings,
            "rms_norm_eps": written.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": written.rope_parameters["rope_theta"],
                "mrope_section": MROPE_SECTION,
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": written.eos_token_id,
            "pad_token_id": written.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_heads": 4,
            "patch_size": PATCH,
            "temporal_patch_size": TEMPORAL_PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": written.hidden_size,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    missing, unexpected = model.model.language_model.load_state_dict(text.model.state_dict(), strict=False)
    assert not missing and not unexpected
    return model


def recipe_facts(args: argparse.Namespace, recipe: VisionRecipe, run: Progressing) -> dict[str, object]:
    """What the model card says of the run."""
    return {
        "seed": SEED,
        "tower_steps": TOWER_STEPS,
        "tower_pictures": PICTURES,
        "dialogues": VISION_DIALOGUES,
        "text_tokens": TEXT_TOKENS,
        "text_share": recipe.text_share(range(0, args.steps, max(1, args.steps // 20))),
        "minutes": duration(args, run),
    }


def finish(
    args: argparse.Namespace, model: Qwen3VLForConditionalGeneration, recipe: VisionRecipe, run: Progressing
) -> None:
    """Measure what was saved, and the text model it descends from, and write the card."""
    scores, text_scores = evaluate(args.output), evaluate(TEXT_MODEL)
    write_vision_card(
        args.output,
        TEXT_MODEL,
        model=model,
        losses=run.losses,
        scores=scores,
        text_scores=text_scores,
        recipe=recipe_facts(args, recipe, run),
    )
    for score in summary(scores):
        print(f"{score.skill}: {score.right}/{score.total} = {score.share:.1%}")


def main(argv: list[str] | None = None) -> int:
    """Train, save, measure, write the model card. Returns the exit status."""
    parser = make_parser("training.tiny_qwen3_vl", __doc__, checkpoint=CHECKPOINT, run_dir=RUN_DIR, steps=STEPS)
    args = parser.parse_args(argv)
    if not may_write(args):
        return 2

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    text = AutoModelForCausalLM.from_pretrained(TEXT_MODEL, dtype=torch.float32)
    model = make_model(text, tokenizer).to(args.device)
    recipe = VisionRecipe(tokenizer, args.steps)
    tower = train_tower(
        model.model.visual,
        model.model.language_model.embed_tokens.weight,
        tokenizer,
        LoopConfig(run_dir=args.run_dir / "tower", steps=TOWER_STEPS, **TOWER),
        device=torch.device(args.device),
    )
    run = train(
        model,
        recipe,
        LoopConfig(run_dir=args.run_dir, steps=args.steps, **LOOP),
        device=torch.device(args.device),
    )
    run.seconds += tower.seconds
    save_vision_checkpoint(model.cpu(), tokenizer, args.output)
    finish(args, model, recipe, run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
