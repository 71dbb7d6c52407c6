"""What the model that sees is trained on and asked is what it was; what is saved is a Qwen3-VL directory; and the
evaluation shows a model what a user would show it."""

import copy
import hashlib
import json
import re
from random import Random

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.processor_settings import read_settings
from m6_multimodal_pd.multimodal.vision_processor import VisionProcessor
from training import evaluate, evaluate_vision, loop, scenes, tiny_qwen3_vl, vision_card, vision_skills
from training.card import sha256
from training.evaluate import CHECKPOINT as TEXT_MODEL
from training.loop import IGNORE, LoopConfig, labelled_logits
from training.recipe import encode
from training.scenes import CELLS, COLORS, PICTURE_SIZES, SHAPES, SIZES, Clip, Scene, Thing, draw_scene
from training.scoring import Answering, Case, Score, ask
from training.vision_checkpoint import TOKENIZER_FILES, save_vision_checkpoint
from training.vision_recipe import VisionRecipe, see
from training.vision_skills import Looked, Turn, patches, still
from training.vision_tower import ASKED, answers_of, train_tower

pytestmark = pytest.mark.exhaustive  # nothing trains in an engine

DIALOGUES = (vision_skills.picture_dialogue, vision_skills.compare_dialogue, vision_skills.clip_dialogue)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TEXT_MODEL)


@pytest.fixture(scope="module")
def random_model(tokenizer) -> Qwen3VLForConditionalGeneration:
    """The model that is trained, around a text model of 16 channels that knows nothing."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tiny_qwen3_vl.make_model(Qwen3ForCausalLM(config), tokenizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, random_model, tokenizer):
    """A directory as the run writes it, with the random model."""
    path = tmp_path_factory.mktemp("checkpoint")
    weights = {name: tensor.clone() for name, tensor in random_model.state_dict().items()}
    save_vision_checkpoint(random_model, tokenizer, path)  # makes it bf16
    random_model.float().load_state_dict(weights)
    return path


@pytest.fixture(scope="module")
def seeing(saved) -> evaluate_vision.Seeing:
    return evaluate_vision.Seeing(saved)


def dialogues(make, count: int = 40) -> list[tuple[Looked, list[Turn]]]:
    return [make(Random(f"test/{i}")) for i in range(count)]


def pixels(item: Scene | Clip) -> np.ndarray:
    return item.frames if isinstance(item, Clip) else item.pixels


def picture(thing: Thing, seed: int = 0) -> np.ndarray:
    return scenes.draw_scene(Random(seed), [thing]).pixels


# --- questions and answers --------------------------------------------------------------------------------------------


VALUES = (*SIZES, *COLORS, *SHAPES, *CELLS, "left", "right", "up", "down", "still", "first", "second", *"01234")


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", DIALOGUES)
def test_no_question_holds_what_its_answer_adds(make):
    """What an answer says is either what was asked about, and then it is in the question, or it has to be seen."""
    for _, turns in dialogues(make, 200):
        for turn in turns:
            asked = set(re.findall(r"\w+", turn.question.lower())) & set(VALUES)
            said = set(re.findall(r"\w+", turn.answer.lower())) & set(VALUES)
            echoed = "There" in turn.answer or turn.skill == "how many" or turn.question.startswith("Describe the ")
            assert echoed or not asked & said, turn
            assert not echoed or not {"0", "1", "2", "3", "4"} & asked, turn


# --- what the model is given ------------------------------------------------------------------------------------------


def rendered(looked: Looked, turns: list[Turn], **options) -> list:
    return vision_skills.vision_chat(looked, [(turn.question, turn.answer) for turn in turns], **options)


@pytest.mark.parametrize("make", DIALOGUES)
@pytest.mark.parametrize("question_first", [False, True])
def test_pieces_tokenise_like_the_whole_text(tokenizer, make, question_first):
    for looked, turns in dialogues(make):
        pieces = rendered(looked, turns, system="Be brief and exact.", question_first=question_first)
        whole = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
        assert [token for token, _ in encode(tokenizer, pieces)] == whole


def messages(looked: Looked, turns: list[Turn], *, question_first: bool = False) -> list[dict]:
    """A dialogue as a user of the checkpoint writes it."""
    kinds = ["video" if isinstance(item, Clip) else "image" for item in looked.seen]
    shown = [{"type": name, name: item} for name, item in zip(kinds, looked.seen, strict=True)]
    text = [{"type": "text", "text": turns[0].question}]
    found = [{"role": "user", "content": text + shown if question_first else shown + text}]
    for turn in turns[1:]:
        found += [{"role": "user", "content": turn.question}]
    for i, turn in enumerate(turns):
        found.insert(2 * i + 1, {"role": "assistant", "content": turn.answer})
    return found


@pytest.mark.parametrize("make", DIALOGUES)
@pytest.mark.parametrize("question_first", [False, True])
def test_a_dialogue_is_rendered_as_the_chat_template_renders_it(seeing, make, question_first):
    """The template has one placeholder for what is looked at; evaluation makes as many of it as training does."""
    for looked, turns in dialogues(make, 10):
        asked = messages(looked, turns, question_first=question_first)[:-1]
        inputs = seeing.inputs([Case("", "", tuple(asked), "")])
        pieces = rendered(looked, turns, question_first=question_first)
        whole = "".join(piece.text for piece in pieces).removesuffix(f"{turns[-1].answer}<|im_end|>\n")
        assert seeing.tokenizer.decode(inputs["input_ids"][0]) == whole
        batch = see(seeing.tokenizer, [(looked, encode(seeing.tokenizer, pieces))])
        length = inputs["input_ids"].shape[1]
        assert inputs["mm_token_type_ids"].equal(batch.vision["mm_token_type_ids"][:, :length])
        for name in batch.vision.keys() - {"mm_token_type_ids"}:
            torch.testing.assert_close(inputs[name], batch.vision[name], rtol=0, atol=1e-6)


def test_a_batch_runs_and_teaches_the_tower_by_what_the_assistant_says_alone(random_model, tokenizer):
    batches = VisionRecipe(tokenizer, steps=10)(3)
    seen = [batch for batch in batches if batch.vision]
    assert {name for batch in seen for name in batch.vision} == {
        "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids"
    }  # fmt: skip
    batch = min(seen, key=lambda batch: batch.input_ids.numel())
    random_model.zero_grad()
    logits = labelled_logits(random_model, batch, torch.float32)
    loss = loop.cross_entropy(logits, batch)
    loss.backward()
    assert len(logits) == (batch.labels[:, 1:] != IGNORE).sum() > 0 and loss.isfinite()
    tower = {name: p.grad for name, p in random_model.model.visual.named_parameters()}
    assert [name for name, grad in tower.items() if not grad.abs().sum() > 0] == []


# --- the recipe -------------------------------------------------------------------------------------------------------


def digest_of(recipe: VisionRecipe, steps) -> str:
    """Of everything that these steps read; colours as whole numbers, whatever a machine makes of the last bit."""
    digest = hashlib.sha256()
    for batch in (batch for step in steps for batch in recipe(step)):
        for tensor in (batch.input_ids, batch.labels, *(batch.vision[name] for name in sorted(batch.vision))):
            whole = ((tensor + 1) * 127.5).round().byte() if tensor.is_floating_point() else tensor
            digest.update(whole.numpy().tobytes())
    return digest.hexdigest()


def test_the_batches_that_trained_the_checkpoint_are_still_the_same(tokenizer):
    recipe = VisionRecipe(tokenizer, steps=tiny_qwen3_vl.STEPS)
    assert tiny_qwen3_vl.STEPS == 2400
    assert digest_of(recipe, range(0, 2400, 200)) == "8f8b5079ba7201e367912fc391b4c777860d5073b71a30c72b9e8be95f63a333"


# --- the directory ----------------------------------------------------------------------------------------------------


def test_the_directory_is_one_of_a_qwen3_vl(saved, random_model):
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(saved)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.state_dict().keys() == random_model.state_dict().keys()
    for name, tensor in random_model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor.bfloat16()), name
    config = AutoConfig.from_pretrained(saved)
    assert config.model_type == "qwen3_vl" and config.architectures == ["Qwen3VLForConditionalGeneration"]
    assert config.text_config.rope_parameters["mrope_section"] == [12, 10, 10]
    assert config.text_config.rope_parameters["mrope_interleaved"] is True
    assert len(config.vision_config.deepstack_visual_indexes) <= config.text_config.num_hidden_layers


def test_the_tokenizer_is_the_text_models_but_for_its_template(saved, tokenizer):
    for name in TOKENIZER_FILES:
        assert (saved / name).read_bytes() == (TEXT_MODEL / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("size", sorted({(96, 96), (64, 160), (256, 256), *scenes.PICTURE_SIZES}))
def test_the_image_processor_makes_the_patches_that_training_makes(saved, size):
    image = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    processor = AutoImageProcessor.from_pretrained(saved, backend="pil")
    made = processor([Image.fromarray(image)], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, size[1] // 16, size[0] // 16]]
    torch.testing.assert_close(made["pixel_values"], torch.from_numpy(patches(still(image))), rtol=0, atol=1e-6)


def test_the_engine_makes_of_a_clip_the_patches_that_training_makes(saved):
    """Where each pixel goes: `tests/m6_multimodal_pd/test_vision_processor.py`."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), dtype=np.uint8)
    vision = AutoConfig.from_pretrained(saved).vision_config
    processor = VisionProcessor(*read_settings(str(saved), MultimodalConfig(), vision))
    made = processor.process(Frames(frames, (0, 1, 2, 3), video_fps=2.0, total=4)).item.feature
    np.testing.assert_allclose(patches(frames), made, rtol=0, atol=1e-6)


# --- the chat template ------------------------------------------------------------------------------------------------


def render(seeing, content, role: str = "user", **options) -> str:
    return seeing.tokenizer.apply_chat_template([{"role": role, "content": content}], tokenize=False, **options)


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("text", ["", "Hi", "  two\nlines \n", "{{ 1 }} <|im_end|> 'ß' 世界"])
def test_a_text_is_rendered_as_the_text_model_does(seeing, tokenizer, text, generate):
    dialogue = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
    options = {"tokenize": False, "add_generation_prompt": generate}
    plain = tokenizer.apply_chat_template(dialogue, **options)
    assert seeing.tokenizer.apply_chat_template(dialogue, **options) == plain
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in dialogue]
    assert seeing.tokenizer.apply_chat_template(parts, **options) == plain


def test_parts_stand_in_the_order_in_which_they_are_given(seeing):
    image, video = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
    shown = [{"type": "image", "image": "a"}, {"type": "video_url", "video_url": {"url": "b"}}]
    content = [*shown, {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "c"}}]
    content += [{"type": "text", "text": "y"}, {"type": "video", "video": "d"}]
    assert render(seeing, content) == f"<|im_start|>user\n{image}{video}x{image}y{video}<|im_end|>\n"
    assert render(seeing, []) == "<|im_start|>user\n<|im_end|>\n"


@pytest.mark.parametrize(
    ("role", "content", "said"),
    [
        ("tool", "x", "unknown role 'tool'"),
        ("user", [{"type": "audio", "audio": "x"}], "'audio'"),
        ("user", [{"type": "text"}], "'text'"),
        ("user", 3, "a text or a list"),
        ("system", [{"type": "image", "image": "x"}], "role 'system' cannot show"),
    ],
)
def test_what_the_template_does_not_know_is_refused(seeing, role, content, said):
    with pytest.raises(TemplateError, match=re.escape(said)):
        render(seeing, content, role)


# --- the evaluation ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return evaluate_vision.cases()


@pytest.mark.exhaustive
def test_every_skill_is_asked_at_least_two_hundred_times_and_always_the_same(cases):
    counts = {skill: sum(case.skill == skill for case in cases) for skill in evaluate_vision.REQUIRED}
    assert min(counts.values()) >= 200 and sum(counts.values()) == len(cases)
    again = evaluate_vision.cases()
    assert [(case.skill, case.size, case.answer) for case in cases] == [(c.skill, c.size, c.answer) for c in again]


@pytest.mark.exhaustive
def test_no_picture_of_the_evaluation_is_one_that_training_draws(cases, tokenizer):
    """Of the first steps; the seeds are of different kinds, so that none can ever be the same."""
    asked = {pixels(item).tobytes() for case in cases for item in evaluate_vision.shown_in(case)}
    drawn = {
        pixels(item).tobytes()
        for step in range(3)
        for i in [Random(f"{tiny_qwen3_vl.SEED}/{step}")]
        for _ in range(32)
        for item in VisionRecipe(tokenizer, tiny_qwen3_vl.STEPS)._vision(i)[0].seen
    }
    assert len(drawn) > 90 and not asked & drawn


@pytest.mark.exhaustive
def test_many_cases_at_once_are_answered_like_each_alone(seeing, cases):
    """Padding on the left, pictures of different sizes, two pictures, clips: none may leak into another's answer."""
    mixed = Random(0).sample(cases, 10) + evaluate.cases(seeing.tokenizer)[:2]
    together = seeing.answers(mixed)
    room = max(len(seeing.tokenizer.encode(case.answer)) for case in mixed) + 4
    for case, answer in zip(mixed, together, strict=True):
        with torch.inference_mode():
            inputs = seeing.inputs([case])
            ids = seeing.model.generate(**inputs, max_new_tokens=room, do_sample=False)
        alone = seeing.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == alone
    assert len(set(together)) > 1


def test_what_is_looked_at_changes_what_the_model_computes(seeing):
    looks = [picture(Thing("big", color, "star", "center")) for color in ("red", "blue")]
    asked = [messages(Looked((Scene((), look),)), [Turn("", "What do you see?", "")])[:1] for look in looks]
    with torch.inference_mode():
        logits = seeing.model(**seeing.inputs([Case("", "", tuple(m), "") for m in asked])).logits
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-4


class Knowing(Answering):
    """Has the right answer to all but every `wrong`-th case."""

    def __init__(self, tokenizer, wrong: int) -> None:
        self.tokenizer, self.wrong, self.asked = tokenizer, wrong, 0

    def prompt(self, case: Case) -> str:
        return case.answer

    def answers(self, batch) -> list[str]:
        self.asked += len(batch)
        return ["?" if (self.asked + i) % self.wrong == 0 else case.answer for i, case in enumerate(batch)]


def test_what_is_asked_is_what_was_asked_when_the_checkpoint_was_measured(cases):
    digest = hashlib.sha256()
    for case in cases:
        for item in evaluate_vision.shown_in(case):
            digest.update(pixels(item).tobytes())
        asked = [part["text"] for part in case.messages[-1]["content"] if part["type"] == "text"]
        digest.update(repr((case.skill, case.size, asked, case.answer)).encode())
    assert digest.hexdigest() == "fd095e700784d75a773eda254c524a64019a249fe69f203e6cf6cdcc1e386ae1"


def test_scores_count_whole_answers(tokenizer, cases):
    scores = ask(Knowing(tokenizer, wrong=10), cases)
    assert sum(score.total for score in scores) == len(cases)
    assert sum(score.right for score in scores) == len(cases) - len(cases) // 10
    assert [score.size for score in scores if score.skill == "describe"] == [
        "1 thing", "2 things", "3 things", "4 things"
    ]  # fmt: skip


def test_a_model_that_sees_must_keep_the_text_skills_within_three_points(saved):
    text = [Score("recall", "3", 96, 100), Score("repeat", "3", 100, 100)]
    needed = evaluate.required(saved, text)
    assert needed["describe"] == 0.95 and needed["recall"] == pytest.approx(0.93)
    seen = [Score(skill, "", 100, 100) for skill in evaluate_vision.REQUIRED]
    assert evaluate.below([*seen, Score("recall", "3", 93, 100), Score("repeat", "3", 97, 100)], needed) == []
    assert evaluate.below([*seen, Score("recall", "3", 92, 100), Score("repeat", "3", 96, 100)], needed) == [
        "recall", "repeat"
    ]  # fmt: skip
    assert evaluate.below([Score("motion", "", 89, 100), Score("what", "", 95, 100)], needed) == ["motion"]


def test_a_text_model_is_asked_what_it_was_asked_before(tokenizer):
    assert evaluate.required(TEXT_MODEL, ()) == evaluate.REQUIRED
    digest = hashlib.sha256()
    for case in evaluate.cases(tokenizer):
        digest.update(repr((case.skill, case.size, case.messages, case.answer)).encode())
    assert digest.hexdigest() == "45729045f6ca6e9873c5127d53bb08093ffa74504163cefb515931c2561c8bd7"


@pytest.mark.parametrize(("motion", "status"), [(90, 0), (89, 1)])
def test_the_exit_status_says_whether_something_is_below(monkeypatch, capsys, tmp_path, motion, status):
    text = [Score(skill, "", 100, 100) for skill in evaluate.REQUIRED]
    asked = []

    def fake(path, **_):
        asked.append(path)
        return [*([Score("motion", "which way", motion, 100)] if path == tmp_path else []), *text]

    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    monkeypatch.setattr(evaluate, "evaluate", fake)
    assert evaluate.main([str(tmp_path), "--json", str(tmp_path / "scores.json")]) == status
    assert asked == [tmp_path, TEXT_MODEL], "what it may forget is measured beside it"
    rows = json.loads((tmp_path / "scores.json").read_text())
    first = {"skill": "motion", "size": "which way", "right": motion, "total": 100}
    assert rows[0] == {"checkpoint": tmp_path.name, **first}


# --- the tower alone --------------------------------------------------------------------------------------------------


def names_of(answers: list[int]) -> list[str]:
    return [("none", *ASKED[question])[number] for question, number in enumerate(answers)]


def test_the_tower_is_asked_what_the_scenes_say():
    things = [Thing("small", "blue", "star", "top"), Thing("big", "red", "circle", "center")]
    scene = draw_scene(Random(0), things, (96, 128))
    answers = answers_of(scene)
    assert [row for row, answer in enumerate(answers) if answer.any()] in ([1, 4], [1, 7])  # of 4 rows of 3 squares
    told = [names_of(row) for row in answers.tolist() if any(row)]
    assert told == [["small", "blue", "star", "top", "none"], ["big", "red", "circle", "none", "none"]]


@pytest.mark.parametrize("size", sorted(set(PICTURE_SIZES)))
def test_a_thing_is_asked_for_where_its_middle_is_drawn(size):
    """What the generator says of the middle, against the pixels: there is no other thing in the picture."""
    rng = Random(7)
    for cell in CELLS:
        scene = draw_scene(rng, [Thing("big", "black", "square", cell)], size)
        rows, columns = np.where((scene.pixels < 60).all(-1))
        [(x, y)] = scene.middles
        assert abs(columns.mean() + 0.5 - x) < 1 and abs(rows.mean() + 0.5 - y) < 1
        [square] = answers_of(scene).any(1).nonzero().tolist()
        assert divmod(square[0], size[0] // 32) == (int(y) // 32, int(x) // 32)


@pytest.mark.exhaustive
def test_a_tower_that_is_taught_its_squares_gets_better_and_goes_on_where_it_stopped(tmp_path, random_model, tokenizer):
    embedding = random_model.model.language_model.embed_tokens.weight.float()

    def taught(name: str, stop_at: float = 1.0) -> tuple[torch.nn.Module, list[float]]:
        """A tower that knows nothing, and what a run in that directory makes of it."""
        tower = copy.deepcopy(random_model.model.visual)
        config = LoopConfig(
            run_dir=tmp_path / name, steps=4, warmup_steps=1, save_every=2, stop_at=stop_at, dtype=torch.float32
        )
        return tower, train_tower(tower, embedding, tokenizer, config, device=torch.device("cpu")).losses

    whole, losses = taught("whole")
    assert len(losses) == 4 and losses[-1] < losses[0]
    _, first = taught("halves", stop_at=0.5)
    resumed, both = taught("halves")
    assert first == losses[:2] and both == losses
    for (name, wanted), found in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(wanted, found), name


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_run_saves_measures_and_describes_and_a_finished_one_goes_straight_on_to_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny_qwen3_vl, "evaluate", fake_scores)
    monkeypatch.setattr(tiny_qwen3_vl, "TOWER_STEPS", 1)
    drawn: list[int] = []  # matplotlib is no part of what tests need
    monkeypatch.setattr(vision_card, "draw_losses", lambda losses, path, **_: drawn.append(len(losses)))
    output, run = tmp_path / "out", tmp_path / "run"
    command = ["--output", str(output), "--run-dir", str(run), "--steps", "1", "--threads", "1"]
    assert tiny_qwen3_vl.main(command) == 0
    weights = sha256(output / "model.safetensors")
    assert tiny_qwen3_vl.main(command) == 2 and "--overwrite" in capsys.readouterr().err

    def trained_again(*_, **__):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(loop, "backward", trained_again)
    (output / "README.md").unlink()
    assert tiny_qwen3_vl.main([*command, "--overwrite"]) == 0
    assert sha256(output / "model.safetensors") == weights
    card = (output / "README.md").read_text()
    assert re.findall(r"sha256 `(\w+)`", card) == [weights, sha256(TEXT_MODEL / "model.safetensors")]
    assert "| motion | says what moves in a clip, and which way | 97/100 = 97.0% |" in card
    assert "| recall | 100/100 = 100.0% | 97/100 = 97.0% |" in card
    for word in (*COLORS, *SHAPES, *CELLS, *SIZES, "96x96", "[12, 10, 10]", "trained together for 1 steps"):
        assert word in card, word
    assert "motion: 97/100 = 97.0%" in capsys.readouterr().out
    assert drawn == [1, 1]
    assert sum(path.stat().st_size for path in output.iterdir()) < 20e6


def fake_scores(path) -> list[Score]:
    text = evaluate.REQUIRED
    if path == TEXT_MODEL:
        return [Score(skill, "", 100, 100) for skill in text]
    return [Score(skill, "", 97, 100) for skill in (*evaluate_vision.REQUIRED, *text)]
