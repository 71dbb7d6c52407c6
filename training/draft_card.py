"""Writes what stands beside the draft checkpoint: its model card and its loss curve."""

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from training.card import draw_losses, sha256, shape
from training.draft_cost import Cost
from training.evaluate_draft import NUM_DRAFTS, Acceptance

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# tiny-qwen3-draft

The draft model of tiny-qwen3, for speculative decoding: it guesses what tiny-qwen3 will say next, and tiny-qwen3
checks several guesses in one forward. A real `Qwen3ForCausalLM` of {parameters:,} parameters, {parameter_share:.1%}
of the target's {target_parameters:,}, with the target's tokenizer. It was trained to agree with tiny-qwen3 and for
nothing else. What it has least room for is copying: where an answer stands in the prompt, n-grams guess better.

| skill | answers of the target | tokens on which both agree | tokens per step | best possible |
|---|---|---|---|---|
{rows}

A step is one forward of the target over {num_drafts} guesses: it yields those that are right, up to the first wrong
one, and one token of the target's own. A draft that is always wrong has 1.00 tokens per step; "best possible" is one
that is always right (less than {most}, because answers end).

Measured by `python -m training.evaluate_draft`: the target answers greedily with transformers (both saved bf16 files,
computed in fp32), and the draft reads along. Asked are all {num_questions} questions in the wording that neither model
was trained on, and the lists of 1 to 44 facts and the texts of up to 60 tokens of `training.evaluate`, drawn from a
seed that no training uses.

## What it costs

| threads | requests in a decode step | target | draft | ratio |
|---|---|---|---|---|
{costs}

Measured by `python -m training.draft_cost` on a {machine}: forward and logits of a decode step in m4's
engine, one of the target and {num_drafts} of the draft in turns, the first decile of many.

## What it is

| | |
|---|---|
| layers, hidden size, MLP size | {layers}, {hidden}, {mlp} |
| query heads, KV heads, head_dim | {heads}, {kv_heads}, {head_dim} |
| vocabulary | {vocab} tokens, the target's; embeddings tied to the head |
| context | {context} positions; trained on dialogues of up to about 900 tokens |
| weights | {size:.1f} MB bf16, sha256 `{sha256}` |
| distilled from | tiny-qwen3, sha256 `{target_sha256}` |

## How it was made

`python -m training.tiny_qwen3_draft`: {steps} of {planned_steps} planned steps of about {tokens_per_step} tokens of
generated text (seed {seed}); the run ends early, because the draft is good enough by then. {span_share:.0%} of the plan
are nothing but random spans said twice, at first of two to eight tokens out of {first_span_tokens}: on those of 8 to 32
tokens, which taught the target, a draft had not begun to copy after 600 steps. Then the three skills mixed
({explain:.0%} of the dialogues explain), with growing lengths; the loss is the KL divergence from the target's
distribution on what the assistant says. Muon for the matrices, AdamW for embeddings and norms, fp32.
{minutes}

![loss curve](loss.png)
"""


def machine() -> str:
    """The machine in words: never by name."""
    return f"{os.cpu_count()}-core CPU machine"


def write_draft_card(
    path: Path,
    target_path: Path,
    *,
    model: PreTrainedModel,
    target_parameters: int,
    losses: Sequence[float],
    acceptances: Sequence[Acceptance],
    costs: Sequence[Cost],
    recipe: dict[str, object],
) -> None:
    """Write `README.md` and `loss.png` into the checkpoint directory `path`; `recipe` says how the run went."""
    draw_losses(
        losses,
        path / "loss.png",
        span_steps=round(float(str(recipe["planned_steps"])) * float(str(recipe["span_share"]))),
        measure="cross entropy, then KL divergence\n(nats per learned token)",
    )
    weights = path / "model.safetensors"
    parameters = sum(p.numel() for p in model.parameters())
    card = CARD.format(
        parameters=parameters,
        target_parameters=target_parameters,
        parameter_share=parameters / target_parameters,
        rows="\n".join(_row(acceptance) for acceptance in acceptances),
        costs="\n".join(_cost_row(cost) for cost in costs),
        num_drafts=NUM_DRAFTS,
        most=NUM_DRAFTS + 1,
        num_questions=next(a.num_answers for a in acceptances if a.skill.startswith("explain")),
        size=weights.stat().st_size / 1e6,
        sha256=sha256(weights),
        target_sha256=sha256(target_path / "model.safetensors"),
        steps=len(losses),
        **shape(model.config),
        **recipe,
    )
    (path / "README.md").write_text(card, encoding="utf-8")


def _row(a: Acceptance) -> str:
    agreed = f"{a.agreed}/{a.tokens} = {a.share:.1%}"
    return f"| {a.skill} | {a.num_answers} | {agreed} | {a.tokens_per_step:.2f} | {a.most_per_step:.2f} |"


def _cost_row(cost: Cost) -> str:
    target, draft = (f"{seconds * 1e6:,.0f} µs" for seconds in (cost.target, cost.draft))
    return f"| {cost.threads} | {cost.batch_size} | {target} | {draft} | {cost.ratio:.2f} |"
