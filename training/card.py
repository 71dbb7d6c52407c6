"""Writes what stands beside a checkpoint: the model card and the loss curve."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from training.explain import questions
from training.scoring import Score, summary

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# tiny-qwen3

A real `Qwen3ForCausalLM` of {parameters:.1f} M parameters that was trained on a CPU to ship with Stepwise, so that an LLM engine can be
learned, tested and measured on a laptop, without a download. It has three skills and no others.

| skill | what it does | measured on | exactly right |
|---|---|---|---|
{rows}

- **explain** answers {num_questions} questions about LLM inference with the text written for them in `training/data`; each was
  trained in five wordings, and a sixth was held out.
- **recall** reads a list of random facts ("The code of zebra is 4821.") and restates the one that is asked for. A wrong position, chunk or
  cache entry in an engine shows at once.
- **repeat** says a text again, to the letter.

Measured by `python -m training.evaluate`: greedy generation with transformers on the saved bf16 file (computed in fp32), on lists and texts drawn
from a seed that training does not use; the whole answer must be right.

## What it is

| | |
|---|---|
| layers, hidden size, MLP size | {layers}, {hidden}, {mlp} |
| query heads, KV heads, head_dim | {heads}, {kv_heads}, {head_dim} (grouped-query attention) |
| vocabulary | {vocab} byte-level BPE tokens, the last {specials} special; digits one by one; embeddings tied to the head |
| context | {context} positions; trained on dialogues of up to about 900 tokens |
| weights | {size:.1f} MB bf16, sha256 `{sha256}` |

Messages are written in ChatML (`<|im_start|>role`, the text, `<|im_end|>`); the three skills also work without the template, as
question, line break, answer. It knows nothing about the world, answers only in English, and makes up an answer for a question that it was not taught.

## How it was made

`python -m training.tiny_qwen3`: {steps} steps of about {tokens_per_step} tokens of generated text (seed {seed}), {span_share:.0%} of them nothing but
random spans said twice, from which the copying circuit forms; then the three skills mixed, with growing lengths. Muon for the matrices,
AdamW for embeddings and norms, bf16 autocast. {minutes}

![loss curve](loss.png)

The first valley is the copying circuit forming on spans of 400 different tokens; the hump behind it is the vocabulary of the spans growing
to all 4,089 ordinary tokens, which the circuit then covers, too. The second peak is the first sight of the skills.
"""


def sha256(weights: Path) -> str:
    """The digest of a file, in hexadecimal."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def shape(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes of a decoder, as the cards name them."""
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "context": config.max_position_embeddings,
    }


def write_card(
    path: Path, model, tokenizer, losses: Sequence[float], scores: Sequence[Score], *, recipe: dict[str, object]
) -> None:
    """Write `README.md` and `loss.png` into the checkpoint directory `path`."""
    draw_losses(losses, path / "loss.png", span_steps=int(len(losses) * float(str(recipe["span_share"]))))
    weights = path / "model.safetensors"
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        rows="\n".join(_row(score, scores) for score in summary(scores)),
        num_questions=len(questions()),
        specials=len(tokenizer.all_special_tokens),
        size=weights.stat().st_size / 1e6,
        sha256=sha256(weights),
        steps=len(losses),
        **shape(model.config),
        **recipe,
    )
    (path / "README.md").write_text(card, encoding="utf-8")


def _row(total: Score, scores: Sequence[Score]) -> str:
    what = {
        "explain, trained wordings": ("answers a question about LLM inference", "all questions, five wordings each"),
        "explain, unseen wording": ("the same", "all questions, a wording it never saw"),
        "recall": ("looks up a fact in the prompt", "unseen lists of 1 to 44 facts (up to 500 tokens)"),
        "repeat": ("says an unseen text again", "unseen texts of up to 60 tokens"),
    }[total.skill]
    return f"| {total.skill} | {what[0]} | {what[1]} | {total.right}/{total.total} = {total.share:.1%} |"


def draw_losses(
    losses: Sequence[float],
    path: Path,
    *,
    span_steps: int | None = None,
    measure: str = "cross entropy (nats per learned token)",
) -> None:
    """The loss of every step, and its running mean, as a PNG; `measure` says what the loss is, `span_steps` how many
    steps read spans first."""
    from matplotlib.figure import Figure

    window = max(1, len(losses) // 100)
    means = [
        sum(losses[max(0, i - window) : i + 1]) / len(losses[max(0, i - window) : i + 1]) for i in range(len(losses))
    ]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color="0.8", linewidth=0.6, label="each step")
    axes.plot(means, color="C0", label=f"mean of {window} steps")
    if span_steps is not None:
        axes.axvline(span_steps, color="C1", linestyle=":", label="spans end, skills begin")
    axes.set(xlabel="step", ylabel=measure, yscale="log")
    axes.legend()
    figure.savefig(path, dpi=110)
