"""The demo of m6: the tour, pictures of a user, a conversation, and one clear line for what cannot be.

The model is random and tiny, so its answers mean nothing: the tests check pictures and numbers.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m3_paged_attention.attention import native_library
from m6_multimodal_pd import MultimodalConfig, SamplingParams, SpeculativeConfig, TraceConfig, demo, demo_tour
from m6_multimodal_pd.demo_terminal import HALF, contact_sheet, half_blocks, loaded, shown
from m6_multimodal_pd.demo_tour import PICTURES, READ, SEEN, Tour, options_for
from m6_multimodal_pd.multimodal.decode_image import Picture
from notebooks import shapes
from notebooks.shapes import Shape
from tests.m6_multimodal_pd.engines import MakeEngine, setting
from tests.support.demos import events_of, words
from training import scenes as scenes_of_training

GREY, RED, BLUE, GREEN = (200, 200, 200), (255, 0, 0), (0, 0, 255), (0, 255, 0)
Printed = tuple[str, list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A screen of 80 columns, without pauses; the demo's number of threads stays in its test."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo_tour, "PACE", 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a picture, and a clip as a file and as a folder."""
    frames = shapes.clip(Shape("big", "green", "square"), frames=4)
    frames[0].save(tmp_path / "picture.png")
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=500)
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{number}.png")
    return tmp_path


def screen(**changes: Any) -> Console:
    """A terminal of 80 x 24 with all colours, that keeps its output."""
    given: dict[str, Any] = {"width": 80, "height": 24, "color_system": "truecolor", "force_terminal": True}
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), legacy_windows=False, **given | changes)
    console.no_color = False
    return console


def printed(console: Console) -> str:
    """The output of `screen`."""
    file: Any = console.file
    file.flush()
    return file.buffer.getvalue().decode()


# --- the tour ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tour(seeing_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """The tour in a pipe, with engines of this process and little traffic, and its trace."""
    trace, console = tmp_path_factory.mktemp("tour") / "trace.jsonl", Console(file=io.StringIO(), width=80)
    flags = f"--model {seeing_directory} --device cpu --max-tokens 3 --page-size 1 --threads 1 --transport in_process"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STREAM_TOKENS": 24, "EVERY": 8, "PROMPT_TOKENS": 64}.items():
            patch.setattr(demo_tour, name, value)
        demo.run(demo.make_parser().parse_args([*flags.split(), "--trace-file", str(trace)]), console)
    file: Any = console.file
    return file.getvalue(), events_of(trace)


def test_the_tour_has_six_parts_on_a_pipe(tour: Printed) -> None:
    out, events = tour
    assert "\x1b" not in out and HALF not in out and max(map(len, out.splitlines())) <= 80
    said = words(out)
    parts = (
        "1. Pictures, a clip and texts in one batch",
        "[a big red circle]",
        "req-0: Describe",
        "2. The positions of the tokens",
        "3. The same picture again",
        "4. Prefill in one engine, decode in another",
        "2 engines load the model and join",
        "Compared with one engine, in part 1: The answers are the same, token for token, all 7 of them.",
        "5. The longest gap of a stream, with one engine and with two",
        "Longest gap of a stream: ",
        "The total:",
        "6. The device never waits",
    )
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    kinds = {event["event"] for event in events}
    assert {"item_received", "positions_assigned", "encoder_run", "encoder_hit", "batch"} <= kinds
    assert {"engine_joined", "request_routed", "reported"} <= kinds, "of the engines that share the work, too"


def test_its_numbers_are_those_of_the_trace(tour: Printed) -> None:
    out, events = tour
    runs = [e for e in events if e["event"] == "encoder_run" and set(e["rids"]) & {f"req-{i}" for i in range(4)}]
    tokens, items = sum(run["num_tokens"] for run in runs), sum(len(run["hashes"]) for run in runs)
    end = next(place for place, event in enumerate(events) if event.get("rid") == "req-7")
    computed = sum(sum(e["extend_lens"][: e["num_prompts"]]) for e in events[:end] if e["event"] == "batch")
    assert (
        f"The prompts have {computed:,} tokens in all; the vision tower made {tokens:,} tokens of {items} items in "
        in (words(out))
    )
    for place, title in ((7, "next question"), (8, "other conversation"), (9, "other star")):
        (admit,) = [e for e in events if e["event"] == "admit" and e["rid"] == f"req-{place}"]
        hits = [e for e in events if e["event"] == "encoder_hit" and e["rid"] == f"req-{place}"]
        made = sum(e["num_tokens"] for e in events if e["event"] == "encoder_run" and f"req-{place}" in e["rids"])
        work = f"{made} made" if made else "found" if hits else "not read"
        total = admit["prefix"] + admit["extend"]
        assert re.search(rf"^{title} +{total} tokens +{admit['prefix']} +{work} +[\d.]+ ms", out, re.M), title
        assert work == {7: "not read", 8: "found"}.get(place, f"{made} made")


def test_the_time_that_overlapped_steps_hide_is_that_of_their_arrivals(tour: Printed) -> None:
    out, events = words(tour[0]), tour[1]
    arrived = [event for event in events if event["event"] == "step_arrived"]
    if native_library.obstacle() is not None:
        assert "- step 0: Steps do not overlap: " in out and not arrived
        return
    device = sum(event["device_ms"] for event in arrived)
    hidden = sum(max(event["device_ms"] - event["waited_ms"], 0) for event in arrived)
    assert f"{len(arrived)} steps: the device computed for {device:.1f} ms, and the host did other work " in out
    assert f"during {hidden:.1f} ms of that." in out
    last = max(event["step"] for event in arrived)
    assert all(f"- step {step}: The tokens have arrived: " in out for step in (last - 1, last))


@pytest.mark.exhaustive
def test_a_model_without_a_vision_tower_takes_the_part_with_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", str(TEXT_MODEL), "--max-tokens", "3", "--num-prompts", "3", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "tokens in all; the vision tower made 0 tokens of 0 items" in words(out)
    assert "Pictures, with parts 2 and 3, are left out: " in words(out) and "takes texts only." in words(out)
    assert "1. Pictures" in out and "2. The" not in out and "4. Prefill" not in out


def test_on_a_terminal_pictures_are_drawn_above_answers_that_stream(make_engine: MakeEngine) -> None:
    engine, console = make_engine(**setting()), screen(height=60)
    tour = Tour({"trace_config": TraceConfig()}, SamplingParams(max_tokens=2, n=2), {}, console)
    outputs = tour.show_batch(engine, {"a": SEEN[3], "b": READ[0]})
    out = printed(console)
    assert HALF in out and "38;2;40;165;70" in out and "What happens in the clip?" in out
    assert [len(output.outputs) for output in outputs.values()] == [2, 2]


def test_a_draft_model_drafts_for_texts_only(make_engine: MakeEngine) -> None:
    prompt = make_engine(**setting()).chat_prompt([{"role": "user", "content": SEEN[0].content}])

    def options(method: str, prompt: list[int]) -> dict[str, Any]:
        engine: Any = SimpleNamespace(config=SimpleNamespace(speculative=SpeculativeConfig(method=method)))  # type: ignore[arg-type]
        return options_for(engine, {"priority": 1}, prompt)

    assert options("draft_model", prompt) == {"priority": 1, "speculate": False}
    assert options("draft_model", [1, 2]) == options("ngram", prompt) == {"priority": 1}


# --- pictures of a user -----------------------------------------------------------------------------------------------


def run_on(model: Path, *argv: str) -> int:
    """The demo on a model, with a few tokens."""
    return demo.main(["--model", str(model), "--device", "cpu", "--threads", "1", "--max-tokens", "2", *argv])


def test_a_picture_and_a_clip_go_with_the_prompt(
    seeing_directory: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)  # a long path would be broken into lines
    media, trace = ["--image", "picture.png", "--video", "clip.gif"], files / "trace.jsonl"
    assert run_on(seeing_directory, *media, "--prompt", "What is red?", "--trace-file", str(trace)) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    assert "picture.png: 96 x 96 pixels]" in words(out) and "clip.gif: 96 x 96 pixels, 4 frames]" in words(out)
    assert [e["modality"] for e in events_of(trace, "item_received")] == ["image", "video"]


def test_pictures_in_a_conversation(
    seeing_directory: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(files))
    lines = (
        "Hello\n/image ~/picture.png\nWhat is it?\nAnd now?\n/image ~/nothing.png\n/image\n"
        f"/image {files / 'picture.png'}\n/reset\nWhat is it?\n/video '{files / 'frames'}'\nWhat happens?\n"
        f"/image {files / 'picture.png'}\n{'word ' * 1100}\nHello\n/nonsense\n/quit\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    trace = files / "trace.jsonl"
    assert run_on(seeing_directory, "--chat", "--video-fps", "2", "--page-size", "1", "--trace-file", str(trace)) == 0
    out, err = capsys.readouterr()
    out = words(out)
    assert err == "" and out.count("it goes with the next question") == 4
    assert out.count("InvalidMediaError: image") == 2 and "there is /image, /reset, /video and /quit" in out
    assert "PromptTooLongError" in out
    brought = [(e["rid"], e["modality"]) for e in events_of(trace, "item_received")]
    last = [("req-5", "video"), ("req-5", "image")]
    assert brought == [("req-1", "image"), ("req-2", "image"), ("req-4", "video"), *last]
    assert len(events_of(trace, "encoder_run")) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image", "nothing.png"], "nothing.png"),
        (["--image", "picture.png", "--image", "nothing.png", "--prompt", "x"], "nothing.png"),
        (["--image", "https://example.org/x.png"], "https: URLs are refused"),
        (["--video", "picture.png"], "still picture"),
        (["--video", "frames", "--video-fps", "0"], "video_fps=0"),
        (["--max-model-len", "40"], "max_model_len is 40"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_picture_or_prompt_that_cannot_be_taken_is_one_clear_line(
    seeing_directory: Path, files: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    paths = [str(files / flag) if (files / flag).exists() else flag for flag in argv]
    assert run_on(seeing_directory, "--trace", "off", *paths) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in out + err


def configs_of(flags: str) -> dict[str, Any]:
    """The configurations of these flags."""
    return demo.configs_of(demo.make_parser().parse_args(flags.split()), Console())


def test_the_flags_of_pictures_reach_the_engine() -> None:
    flags = "--encoder-budget 7 --embedding-cache-bytes 9 --min-pixels 1 --max-pixels 5 --allow-url file"
    assert configs_of(flags)["multimodal_config"] == MultimodalConfig(
        encoder_budget=7,
        embedding_cache_bytes=9,
        min_pixels=1,
        max_pixels=5,
        allowed_url_schemes=["file"],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("flags", "expected"), [("", None), ("--enable-overlap", True), ("--no-enable-overlap", False)]
)
def test_steps_overlap_as_the_flags_request(flags: str, expected: bool | None) -> None:
    assert configs_of(flags)["scheduler_config"].enable_overlap is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "ngram"),
        ("--speculative draft_model --draft-model somewhere", "draft_model"),
        ("--prompt hello", None),
        ("--chat --speculative ngram", "ngram"),
    ],
)
def test_the_source_of_drafts(flags: str, expected: str | None) -> None:
    assert configs_of(flags)["speculative_config"].method == expected


# --- pictures in a terminal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"color_system": None}, {"file": io.TextIOWrapper(io.BytesIO(), encoding="ascii"), "width": 80}],
    ids=["no colours", "no half block"],
)
def test_where_a_picture_cannot_be_drawn_its_words_are_printed(changes: dict[str, Any]) -> None:
    picture = Picture(np.zeros((8, 8, 3), np.uint8))
    console = Console(force_terminal=True, **{"color_system": "truecolor", "file": screen().file, **changes})
    assert shown(picture, "a cat", console, 8).plain == "[a cat]" and HALF in shown(picture, "a cat", screen(), 8).plain


def test_a_character_shows_two_pixels_one_above_the_other() -> None:
    drawn = half_blocks(np.array([[RED, GREEN], [BLUE, GREY]], np.uint8), 2)
    assert drawn.plain == f"{HALF}{HALF}\n"
    assert [(span.start, span.end, span.style) for span in drawn.spans] == [
        (0, 1, Style(color=Color.from_rgb(*RED), bgcolor=Color.from_rgb(*BLUE))),
        (1, 2, Style(color=Color.from_rgb(*GREEN), bgcolor=Color.from_rgb(*GREY))),
    ]


@pytest.mark.parametrize(
    ("height", "width", "size"), [(96, 96, (16, 32)), (100, 200, (8, 32)), (400, 100, (16, 8)), (1, 1000, (1, 32))]
)
def test_a_picture_fills_its_box_and_keeps_its_shape(height: int, width: int, size: tuple[int, int]) -> None:
    lines = half_blocks(np.zeros((height, width, 3), np.uint8), 32).plain.splitlines()
    assert (len(lines), len(lines[0])) == size


def test_a_clip_is_a_sheet_of_its_first_to_last_frames() -> None:
    sheet = contact_sheet(np.stack([np.full((24, 24, 3), 10 * number, np.uint8) for number in range(1, 8)]))
    assert sheet.shape == (51, 51, 3) and sheet[25, 25].tolist() == [0] * 3
    assert [sheet[y, x, 0] for y in (0, 50) for x in (0, 50)] == [10, 30, 50, 70]


# --- pictures that the model that ships was not trained on ------------------------------------------------------------

RAMP = np.linspace(0, 255, 96).round().astype(np.uint8)
FAR = {
    "noise": np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8),
    "a gradient": np.broadcast_to(RAMP[:, None, None], (96, 96, 3)),
    "a sky, bright and without detail, above a street": np.concatenate(
        [np.full((40, 96, 3), 255, np.uint8), np.random.default_rng(0).integers(0, 90, (56, 96, 3), dtype=np.uint8)]
    ),
    "a drawn scene that is large": np.full((400, 400, 3), 200, np.uint8),
}


@pytest.mark.parametrize("name", FAR)
def test_a_picture_that_is_unlike_the_scenes_of_the_training_is_found(name: str) -> None:
    assert demo.is_far_from_training(FAR[name])


def test_scenes_and_clips_of_the_training_and_of_the_demo_are_near_to_it() -> None:
    rng = Random(0)
    scenes = [scenes_of_training.random_scene(rng).pixels for _ in range(200)]
    clips = [scenes_of_training.random_clip(rng).frames for _ in range(20)]
    kinds = [("video" if "moves" in path.name else "image", path) for path in PICTURES.iterdir()]
    of_the_demo = [loaded({"type": kind, kind: path}, MultimodalConfig(), path.name).pixels for kind, path in kinds]
    assert len(of_the_demo) == 5 and not any(map(demo.is_far_from_training, [*scenes, *clips, *of_the_demo]))


def test_a_note_beside_such_a_picture_is_for_the_model_that_ships(
    seeing_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noise.png"
    Image.fromarray(FAR["noise"]).save(path)
    flags = ["--image", str(path), "--image", str(PICTURES / SEEN[0].file), "--trace", "off", "--prompt", "What is it?"]
    assert demo.main([*flags, "--max-tokens", "2"]) == 0
    assert words(capsys.readouterr().out).count(words(demo.NOTE)) == 1
    assert run_on(seeing_directory, *flags) == 0
    assert "Note:" not in capsys.readouterr().out
