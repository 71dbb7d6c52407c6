"""Trains `m1_single_request/checkpoints/tiny-qwen3`: `python -m training.tiny_qwen3`.

Runs to the end on two CPU cores in well under 150 minutes, goes on where it stopped, and refuses to overwrite a
finished checkpoint unless told to (`--overwrite`).
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from training.card import write_card
from training.evaluate import evaluate
from training.loop import LoopConfig, Progressing, train
from training.recipe import SEED, TARGET_PLAN, TOKENS_PER_STEP, Recipe
from training.scoring import summary
from training.tokenizer import train_tokenizer

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "m1_single_request" / "checkpoints" / "tiny-qwen3"
RUN_DIR = Path(__file__).parent / "runs" / "tiny-qwen3"
STEPS = 3200


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3 of 4.2 M parameters: 4 layers, 4 query heads over 2 KV heads of 64."""
    torch.manual_seed(SEED)
    config = make_config(
        tokenizer,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return Qwen3ForCausalLM(config)


def make_config(tokenizer: PreTrainedTokenizerBase, **sizes: int) -> Qwen3Config:
    """A Qwen3 of these sizes for this tokenizer: what target and draft have in common."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the Hugging Face directory: bf16 weights, config, generation config, tokenizer."""
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    for file in path.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone


def duration(args: argparse.Namespace, run: Progressing) -> str:
    """A sentence for the model card."""
    threads = f"{args.threads} CPU thread{'' if args.threads == 1 else 's'}" if args.device == "cpu" else args.device
    return f"The run took {run.seconds / 60:.0f} minutes on {threads} (torch {torch.__version__})."


def recipe_facts(args: argparse.Namespace, run: Progressing) -> dict[str, object]:
    """What the model card says of the run."""
    return {
        "tokens_per_step": f"{TOKENS_PER_STEP:,}",
        "seed": SEED,
        "span_share": TARGET_PLAN.spans_only,
        "minutes": duration(args, run),
    }


def make_parser(module: str, doc: str, *, checkpoint: Path, run_dir: Path, steps: int) -> argparse.ArgumentParser:
    """The command line of a training run: the same for every checkpoint."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])
    parser.add_argument("--output", type=Path, default=checkpoint, help="where the finished checkpoint goes")
    parser.add_argument("--run-dir", type=Path, default=run_dir, help="where the resumable state lies meanwhile")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of the run (default: {steps})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is already there")
    return parser


def may_write(args: argparse.Namespace) -> bool:
    """Whether the run may put its checkpoint where it is told to; says so if not."""
    taken = (args.output / "model.safetensors").exists() and not args.overwrite
    if taken:
        print(f"{args.output} holds a checkpoint already; --overwrite replaces it", file=sys.stderr)
    return not taken


def main(argv: list[str] | None = None) -> int:
    """Train, save, evaluate, write the model card. Returns the exit status."""
    parser = make_parser("training.tiny_qwen3", __doc__, checkpoint=CHECKPOINT, run_dir=RUN_DIR, steps=STEPS)
    args = parser.parse_args(argv)
    if not may_write(args):
        return 2

    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer()
    model = make_model(tokenizer).to(args.device)
    run = train(
        model,
        Recipe(tokenizer, args.steps),
        LoopConfig(run_dir=args.run_dir, steps=args.steps),
        device=torch.device(args.device),
    )
    save_checkpoint(model.cpu(), tokenizer, args.output)
    scores = evaluate(args.output)
    write_card(args.output, model, tokenizer, run.losses, scores, recipe=recipe_facts(args, run))
    for score in summary(scores):
        print(f"{score.skill}: {score.right}/{score.total} = {score.share:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
