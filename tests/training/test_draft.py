"""The draft model is distilled by its recipe, its acceptance is counted right, and its checkpoint is what it says."""

import hashlib
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tests.training.tiny import check_resumes_exactly, tiny_model
from training import evaluate_draft, tiny_qwen3_draft
from training.card import sha256
from training.distillation import Distillation
from training.draft_cost import BATCH_SIZES, measure_cost
from training.evaluate import CHECKPOINT as TARGET
from training.evaluate_draft import CHECKPOINT as DRAFT, Acceptance, agreement, measure, verification_steps
from training.loop import IGNORE, Batch, LoopConfig, cross_entropy, labelled_logits, train
from training.recipe import Recipe
from training.tiny_qwen3_draft import PLAN

pytestmark = pytest.mark.exhaustive  # nothing trains in an engine

FIRST_SPECIAL = 45  # of the 50 tokens of the tiny models below


def opinionated_target() -> Qwen3ForCausalLM:
    """A target that is sure of something: a fresh one says next to nothing, and there would be nothing to learn."""
    target = tiny_model(seed=1, hidden_size=24)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20)
    return target


def dialogues(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(50, (8, 12), generator=generator)
    ids[:, 0] = FIRST_SPECIAL
    labels = ids.clone()
    labels[:, :4] = IGNORE
    return [Batch(ids[:5], labels[:5]), Batch(ids[5:], labels[5:])]


def distil(path, make_batches, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    draft = tiny_model(seed=0, hidden_size=16)
    config = LoopConfig(run_dir=path, steps=steps, warmup_steps=2, save_every=2, dtype=torch.float32)
    loss = Distillation(opinionated_target(), FIRST_SPECIAL)
    losses = train(draft, make_batches, config, device=torch.device("cpu"), loss=loss).losses
    return losses, draft.state_dict()


# --- recipe and loss --------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_batches_that_trained_the_target_are_still_the_same():
    """Of the whole recipe, by its digest from before it could be told another plan."""
    recipe, digest = Recipe(AutoTokenizer.from_pretrained(TARGET), steps=3200), hashlib.sha256()
    for step in range(0, 3200, 160):
        for batch in recipe(step):
            for tensor in (batch.input_ids, batch.labels):
                digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "9c4f407898c1de949f5bd13cdfa0bb172d6afc5d291159364ee2aaaa0db8af49"


def test_the_draft_begins_with_short_spans_of_few_tokens():
    recipe = Recipe(AutoTokenizer.from_pretrained(TARGET), steps=1000, plan=PLAN)
    ids, labels, _ = recipe(0)[0]
    assert ids.shape[1] == 2 * PLAN.first_span_lengths[1]
    read = {token for batch in recipe(0) for token in batch.input_ids.flatten().tolist()}
    assert read <= {0, *recipe.span_tokens[:64]}
    assert ids[0, :8].equal(ids[0, 8:]) and labels[0].tolist() == [IGNORE] * 8 + ids[0, 8:].tolist()


def test_the_loss_of_a_dialogue_is_zero_exactly_where_the_target_agrees():
    target, batch = opinionated_target(), dialogues(0)[0]
    loss = Distillation(target, FIRST_SPECIAL)
    same, other = labelled_logits(target, batch), labelled_logits(tiny_model(0, 16), batch)
    assert loss(same, batch).item() == pytest.approx(0.0, abs=1e-4)
    assert loss(other, batch).item() > 1.0


def test_the_loss_of_a_dialogue_is_the_divergence_from_the_target():
    target, batch = opinionated_target(), dialogues(0)[0]
    logits = labelled_logits(tiny_model(0, 16), batch)
    wanted = labelled_logits(target, batch).softmax(-1)
    by_hand = (wanted * (wanted.log() - logits.log_softmax(-1))).sum()
    assert Distillation(target, FIRST_SPECIAL)(logits, batch).item() == pytest.approx(by_hand.item(), rel=1e-4)


def test_where_there_are_only_spans_the_target_is_not_asked():
    ids = torch.randint(FIRST_SPECIAL, (3, 8), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids)
    logits = labelled_logits(tiny_model(0, 16), batch)
    nobody = torch.nn.Module()  # cannot be called
    assert Distillation(nobody, FIRST_SPECIAL)(logits, batch).equal(cross_entropy(logits, batch))


@pytest.mark.exhaustive
def test_distillation_brings_the_draft_closer_to_the_target(tmp_path):
    losses, _ = distil(tmp_path, lambda step: dialogues(0), steps=50)
    assert losses[-1] < 0.75 * losses[0]


def test_a_distillation_that_was_killed_and_resumed_ends_exactly_where_an_uninterrupted_one_does(tmp_path):
    check_resumes_exactly(tmp_path, lambda path, batches: distil(path, batches, steps=6), dialogues)


# --- acceptance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agrees", "steps"),
    [
        ("", 0),
        ("x", 1),  # the guess is wrong, the target says the token itself
        ("x x x", 3),
        ("+", 1),
        ("+ + + +", 1),  # four guesses are right, and there the answer ends
        ("+ + + + x", 1),  # the fifth token is the target's own: nobody guessed it
        ("+ + + + + +", 2),
        ("+ x + + + + + x", 2 + 1),  # 2 tokens, 5, and the last
        ("+ + x x +", 3),  # 3 tokens, 1, 1
    ],
)
def test_a_step_accepts_the_guesses_up_to_the_first_wrong_one_and_adds_a_token(agrees, steps):
    assert verification_steps([mark == "+" for mark in agrees.split()]) == steps


def test_the_first_token_of_an_answer_takes_no_step():
    """The prompt's own forward gives it. The other nine come as 5, 1, 2 and 1; the other two one by one."""
    rows = [[False, *[True] * 4, True, False, True, False, True], [True, False, True]]
    assert measure("repeat", rows) == Acceptance("repeat", 2, 13, 9, 11, steps=4 + 2, fewest_steps=2 + 1)
    assert measure("repeat", rows).share == 9 / 13
    assert measure("repeat", rows).tokens_per_step == 11 / 6 and measure("repeat", rows).most_per_step == 11 / 3


def test_the_draft_agrees_where_it_would_have_said_the_same_token():
    def plus_one(input_ids, use_cache):
        return SimpleNamespace(logits=functional.one_hot(input_ids + 1, num_classes=50))

    found = agreement(plus_one, [([3, 4], [5, 6, 9, 10]), ([7], [7, 8])])
    assert found == [[True, True, False, True], [False, True]]


def test_reading_along_counts_the_steps_that_drafting_would_take():
    """The answer is the draft's own with every seventh token changed, so that there is something to disagree about."""
    draft = opinionated_target().eval()
    prompt, answer = [1, 2, 3], []
    for i in range(40):
        token = greedy(draft, prompt + answer)
        answer.append((token + 1) % 50 if i % 7 == 6 else token)
    at, steps = 1, 0  # the first token comes with the prompt
    while at < len(answer):
        drafts: list[int] = []
        for _ in range(evaluate_draft.NUM_DRAFTS):
            drafts.append(greedy(draft, prompt + answer[:at] + drafts))
        wrong = [i for i, (guess, token) in enumerate(zip(drafts, answer[at:], strict=False)) if guess != token]
        at += (wrong[0] if wrong else evaluate_draft.NUM_DRAFTS) + 1
        steps += 1
    [agrees] = agreement(draft, [(prompt, answer)])
    assert verification_steps(agrees[1:]) == steps and 0 < sum(agrees) < len(agrees)


@torch.inference_mode()
def greedy(model: Qwen3ForCausalLM, ids: list[int]) -> int:
    return int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def test_the_checkpoint_has_at_most_an_eighth_of_the_parameters_of_the_target():
    sizes = [sum(t.numel() for t in load_file(path / "model.safetensors").values()) for path in (DRAFT, TARGET)]
    assert sizes[1] == 4_197_120 and 8 * sizes[0] <= sizes[1]


def test_the_checkpoint_says_the_same_tokens_as_the_target():
    for name in tiny_qwen3_draft.TOKENIZER_FILES:
        assert (DRAFT / name).read_bytes() == (TARGET / name).read_bytes(), name
    draft, target = (AutoModelForCausalLM.from_pretrained(path).config for path in (DRAFT, TARGET))
    for name in ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "dtype", "rope_parameters"):
        assert getattr(draft, name) == getattr(target, name), name
    assert draft.tie_word_embeddings and draft.head_dim % 32 == 0


def test_the_card_names_the_weights_and_those_they_were_distilled_from():
    card = (DRAFT / "README.md").read_text(encoding="utf-8")
    digests = [sha256(path / "model.safetensors") for path in (DRAFT, TARGET)]
    assert re.findall(r"sha256 `(\w+)`", card) == digests, "train the draft again: it was distilled from another target"


def test_every_file_of_the_checkpoint_may_be_read_by_everybody():
    assert {oct(path.stat().st_mode & 0o777) for path in DRAFT.iterdir()} == {"0o644"}


def test_the_checkpoint_guesses_what_the_target_says_to_wordings_it_never_saw():
    tokenizer = AutoTokenizer.from_pretrained(TARGET, padding_side="left")
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (TARGET, DRAFT))
    chosen = evaluate_draft.chosen_cases(tokenizer)[:12]
    rows = agreement(draft, evaluate_draft.answers(target, tokenizer, chosen))
    assert measure("explain", rows).tokens_per_step > 3.0


def test_the_checkpoint_runs_in_the_engine():
    before = torch.get_num_threads()
    costs = measure_cost(DRAFT, threads=[1], rounds=10)  # of fewer, a decile is extrapolated: below zero, even
    assert [(cost.threads, cost.batch_size) for cost in costs] == [(1, size) for size in BATCH_SIZES]
    assert all(cost.draft > 0 for cost in costs) and torch.get_num_threads() == before
