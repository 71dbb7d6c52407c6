"""Trains `m5_chunked_prefill_spec/checkpoints/tiny-qwen3-draft`: `python -m training.tiny_qwen3_draft`.

The draft model guesses what tiny-qwen3 will say next, for speculative decoding: an eighth of its size, its tokenizer,
and distilled from it. Like the target's training, this goes on where it stopped, and refuses to overwrite.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from training.distillation import Distillation
from training.draft_card import machine, write_draft_card
from training.draft_cost import measure_cost
from training.evaluate_draft import CHECKPOINT, evaluate_draft
from training.loop import LoopConfig, Progressing, train
from training.recipe import Plan, Recipe
from training.tiny_qwen3 import CHECKPOINT as TARGET, duration, make_config, make_parser, may_write, save_checkpoint

RUN_DIR = Path(__file__).parent / "runs" / "tiny-qwen3-draft"
STEPS = 6000
PLAN = Plan(
    seed=20261122,
    tokens_per_step=2048,
    spans_only=0.20,
    first_span_tokens=64,
    span_growth=64.0,
    first_span_lengths=(2, 8),
    recall=0.24,
    repeat=0.20,
    spans=0.06,
    explain=0.50,
)
STOP_AT = 0.7  # of the steps: by then the draft knows nearly all explanations, and guesses well enough to pay
LOOP: dict[str, Any] = {
    "matrix_lr": 0.02,
    "vector_lr": 1e-2,
    "save_every": 100,
    "stop_at": STOP_AT,
    "dtype": torch.float32,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_draft(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3 of 0.49 M parameters, half of them embeddings: 2 layers, 2 heads.

    So small a model costs by its layers, whatever their width. With three it was right more often, but a guess cost
    over a third of what the target's own token costs.
    """
    torch.manual_seed(PLAN.seed)
    config = make_config(
        tokenizer,
        hidden_size=64,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )
    return Qwen3ForCausalLM(config)


def save_draft(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the Hugging Face directory, with the target's own tokenizer files, byte for byte."""
    save_checkpoint(model, tokenizer, path)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TARGET / name, path / name)


def recipe_facts(args: argparse.Namespace, run: Progressing) -> dict[str, object]:
    """What the model card says of the run."""
    return {
        "planned_steps": args.steps,
        "tokens_per_step": f"{PLAN.tokens_per_step:,}",
        "seed": PLAN.seed,
        "span_share": PLAN.spans_only,
        "first_span_tokens": PLAN.first_span_tokens,
        "explain": PLAN.explain,
        "minutes": duration(args, run),
    }


def finish(args: argparse.Namespace, model: Qwen3ForCausalLM, target_parameters: int, run: Progressing) -> None:
    """Measure what was saved, and write the card."""
    acceptances, costs = evaluate_draft(args.output), measure_cost(args.output)
    write_draft_card(
        args.output,
        TARGET,
        model=model,
        target_parameters=target_parameters,
        losses=run.losses,
        acceptances=acceptances,
        costs=costs,
        recipe=recipe_facts(args, run) | {"machine": machine()},
    )
    for acceptance in acceptances:
        print(f"{acceptance.skill}: {acceptance.share:.1%} agreed, {acceptance.tokens_per_step:.2f} tokens per step")


def main(argv: list[str] | None = None) -> int:
    """Train, save, measure, write the model card. Returns the exit status."""
    parser = make_parser("training.tiny_qwen3_draft", __doc__, checkpoint=CHECKPOINT, run_dir=RUN_DIR, steps=STEPS)
    args = parser.parse_args(argv)
    if not may_write(args):
        return 2

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).to(args.device)
    model = make_draft(tokenizer).to(args.device)
    run = train(
        model,
        Recipe(tokenizer, args.steps, PLAN),
        LoopConfig(run_dir=args.run_dir, steps=args.steps, **LOOP),
        device=torch.device(args.device),
        loss=Distillation(target, min(tokenizer.all_special_ids)),
    )
    save_draft(model.cpu(), tokenizer, args.output)
    finish(args, model, target.num_parameters(), run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
