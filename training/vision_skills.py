"""The skills of tiny-qwen3-vl as endless streams of dialogues about what `training/scenes.py` draws.

A dialogue begins with pictures or a clip; the loss is taken on what the assistant says. Like the text skills,
everything is a function of the random generator handed in.
"""

from dataclasses import dataclass
from random import Random

import numpy as np

from training.scenes import CELLS, COLORS, SHAPES, Clip, Scene, Thing, random_change, random_clip, random_scene
from training.skills import Piece, chat

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
PATCH, TEMPORAL_PATCH, MERGE = 16, 2, 2


@dataclass(frozen=True)
class Turn:
    """A question about a picture with the only answer that counts. `skill` says what it takes."""

    skill: str
    question: str
    answer: str


@dataclass(frozen=True)
class Looked:
    """What a dialogue looks at: pictures `[height, width, 3]` or clips, in the order in which they are shown."""

    seen: tuple[Scene | Clip, ...]

    def text(self) -> str:
        """The placeholders as they stand in the prompt, one for each merged patch."""
        return "".join(_clip_text(item) if isinstance(item, Clip) else _picture_text(item) for item in self.seen)


def _picture_text(scene: Scene) -> str:
    height, width = scene.pixels.shape[:2]
    return VISION_START + IMAGE_PAD * merged(height, width) + VISION_END


def _clip_text(clip: Clip) -> str:
    height, width = clip.frames.shape[1:3]
    frame = VISION_START + VIDEO_PAD * merged(height, width) + VISION_END
    pairs = zip(clip.seconds[::TEMPORAL_PATCH], clip.seconds[1::TEMPORAL_PATCH], strict=True)
    return "".join(f"<{(first + last) / 2:.1f} seconds>{frame}" for first, last in pairs)


def merged(height: int, width: int) -> int:
    """Tokens of a picture whose sides are multiples of 32: 2 x 2 patches of 16 x 16 pixels become one."""
    side = PATCH * MERGE
    return (height // side) * (width // side)


# --- one picture ------------------------------------------------------------------------------------------------------

DESCRIBE = ("Describe the picture.", "Describe this image.", "What do you see?", "What is in the picture?")


def describe(scene: Scene) -> str:
    """Where first: then what is there only has to be looked up."""
    return sentence(", ".join(f"at the {thing.cell} a {thing.name}" for thing in scene.things))


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def describe_turn(rng: Random, scene: Scene) -> Turn:
    return Turn("describe", rng.choice(DESCRIBE), describe(scene))


def what_turn(rng: Random, scene: Scene) -> Turn:
    """What is in a cell that holds something, or, now and then, nothing."""
    taken = {thing.cell: thing for thing in scene.things}
    free = [cell for cell in CELLS if cell not in taken]
    cell = rng.choice(free) if rng.random() < 0.25 else rng.choice(list(taken))
    question = rng.choice(("What is at the {}?", "What do you see at the {}?")).format(cell)
    return Turn("what", question, sentence(f"a {taken[cell].name}") if cell in taken else "Nothing.")


def where_turn(rng: Random, scene: Scene) -> Turn:
    """Where the only thing of a colour and a shape is; now and then one that is not there."""
    kinds = [(thing.color, thing.shape) for thing in scene.things]
    single = [thing for thing in scene.things if kinds.count((thing.color, thing.shape)) == 1]
    if not single or rng.random() < 0.2:
        absent = [(c, s) for c in COLORS for s in SHAPES if (c, s) not in kinds]
        color, shape = rng.choice(absent)
        return Turn("where", f"Where is the {color} {shape}?", f"There is no {color} {shape}.")
    thing = rng.choice(single)
    return Turn("where", f"Where is the {thing.color} {thing.shape}?", f"At the {thing.cell}.")


def how_many_turn(rng: Random, scene: Scene) -> Turn:
    """How many shapes: all, those of a colour, those of a form. They are pointed out one by one, and then counted."""
    draw = rng.random()
    if draw < 0.4:
        noun, meant = "shape", list(scene.things)
    elif draw < 0.7:
        color = _mostly(rng, [thing.color for thing in scene.things], list(COLORS))
        noun, meant = f"{color} shape", [thing for thing in scene.things if thing.color == color]
    else:
        shape = _mostly(rng, [thing.shape for thing in scene.things], list(SHAPES))
        noun, meant = shape, [thing for thing in scene.things if thing.shape == shape]
    plural = f"{noun}{'es' if noun == 'cross' else 's'}"
    found = f"There are no {plural}."
    if meant:
        pointed = ", ".join(f"one at the {thing.cell}" for thing in meant)
        found = sentence(f"{pointed}: {len(meant)} {noun if len(meant) == 1 else plural}")
    return Turn("how many", f"How many {plural} are there?", found)


def _mostly(rng: Random, present: list[str], everything: list[str]) -> str:
    return rng.choice(present) if rng.random() < 0.7 else rng.choice(everything)


def color_turn(rng: Random, scene: Scene) -> Turn:
    """The colour of the only thing of its shape, or of any thing by its place."""
    shapes = [thing.shape for thing in scene.things]
    single = [thing for thing in scene.things if shapes.count(thing.shape) == 1]
    if single and rng.random() < 0.7:
        thing = rng.choice(single)
        return Turn("what", f"What color is the {thing.shape}?", sentence(thing.color))
    thing = rng.choice(scene.things)
    return Turn("what", f"What color is the {thing.shape} at the {thing.cell}?", sentence(thing.color))


PICTURE_TURNS = (what_turn, where_turn, how_many_turn, color_turn)


def picture_dialogue(rng: Random) -> tuple[Looked, list[Turn]]:
    """One picture: its description, or questions about it, or both."""
    scene = random_scene(rng)
    turns = [turn(rng, scene) for turn in rng.sample(PICTURE_TURNS, k=rng.choice((2, 3, 4)))]
    if rng.random() < 0.8:
        turns.insert(rng.choice((0, 0, 1)), describe_turn(rng, scene))
    return Looked((scene,)), turns


# --- two pictures -----------------------------------------------------------------------------------------------------

COMPARE = ("Compare the two pictures.", "What is different?", "What changed?")


def compare(before: Scene, after: Scene, what: str) -> str:
    """Both are described first: what differs in them is then read off two texts."""
    first, second = describe(before)[:-1], describe(after)[:-1]
    changed = "nothing" if what == "nothing" else f"the {what}"
    return f"{first}, then {second[0].lower()}{second[1:]}: {changed} changed."


def describe_one_turn(rng: Random, scenes: tuple[Scene, Scene]) -> Turn:
    """What one of two pictures shows."""
    number = rng.randrange(2)
    return Turn("compare", f"Describe the {('first', 'second')[number]} picture.", describe(scenes[number]))


def which_turn(rng: Random, first: Thing, second: Thing) -> Turn:
    """Which of two pictures shows a colour, or a shape."""
    of_color = rng.random() < 0.5
    options = list(COLORS) if of_color else list(SHAPES)
    values = [thing.color if of_color else thing.shape for thing in (first, second)]
    asked = _mostly(rng, values, options)
    answer = {(True, True): "Both.", (True, False): "The first.", (False, True): "The second.", (False, False): "None."}
    noun = f"{asked} shape" if of_color else asked
    return Turn("compare", f"Which picture shows a {noun}?", answer[values[0] == asked, values[1] == asked])


def changed_turn(rng: Random, before: Scene, after: Scene, what: str) -> Turn:
    """What changed from the first picture to the second."""
    return Turn("compare", rng.choice(COMPARE), compare(before, after, what))


def compare_dialogue(rng: Random) -> tuple[Looked, list[Turn]]:
    """Two pictures, what changed from one to the other, and which of them shows something."""
    before, after, what = random_change(rng)
    turns = [changed_turn(rng, before, after, what), which_turn(rng, before.things[0], after.things[0])]
    if rng.random() < 0.5:
        turns.append(describe_one_turn(rng, (before, after)))
    rng.shuffle(turns)
    return Looked((before, after)), turns


# --- a clip -----------------------------------------------------------------------------------------------------------

HAPPENS = ("What happens in the clip?", "Describe the clip.", "What happens in the video?")


def moves(motion: str) -> str:
    return "stays still" if motion == "still" else f"moves {motion}"


def happens_turn(rng: Random, clip: Clip) -> Turn:
    """What moves, and which way."""
    return Turn("motion", rng.choice(HAPPENS), sentence(f"a {clip.thing.name} {moves(clip.motion)}"))


def which_way_turn(clip: Clip) -> Turn:
    """Which way it moves."""
    return Turn("motion", f"Which way does the {clip.thing.shape} move?", sentence(f"it {moves(clip.motion)}"))


def clip_dialogue(rng: Random) -> tuple[Looked, list[Turn]]:
    """A clip, what happens in it, and which way its thing moves."""
    clip = random_clip(rng)
    turns = [happens_turn(rng, clip), which_way_turn(clip)]
    if rng.random() < 0.3:
        turns.append(Turn("motion", f"What color is the {clip.thing.shape}?", sentence(clip.thing.color)))
    rng.shuffle(turns)
    return Looked((clip,)), turns


# --- what the model is given ------------------------------------------------------------------------------------------


def vision_chat(
    looked: Looked, turns: list[tuple[str, str]], system: str | None = None, *, question_first: bool = False
) -> list[Piece]:
    """Render a dialogue as the chat template does: what is looked at stands before the first question, or behind it."""
    question, answer = turns[0]
    first = question + looked.text() if question_first else looked.text() + question
    return chat([(first, answer), *turns[1:]], system)


def patches(frames: np.ndarray) -> np.ndarray:
    """Rows `[patches, 3 * 2 * 16 * 16]` of frames `[even count, height, width, 3]`, as the vision tower reads them.

    Rows come pair of frames by pair of frames, inside it by 2 x 2 blocks of patches; a row is channel, frame, y, x.
    """
    count, height, width, channels = frames.shape
    high, wide = height // (PATCH * MERGE), width // (PATCH * MERGE)
    scaled = frames.astype(np.float32) / 127.5 - 1
    split = scaled.reshape(count // TEMPORAL_PATCH, TEMPORAL_PATCH, high, MERGE, PATCH, wide, MERGE, PATCH, channels)
    ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(-1, channels * TEMPORAL_PATCH * PATCH * PATCH)


def still(pixels: np.ndarray) -> np.ndarray:
    """A picture as the tower sees it: twice, as if it were a pair of frames."""
    return np.stack([pixels] * TEMPORAL_PATCH)
