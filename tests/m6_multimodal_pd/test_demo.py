"""The demo, run as a reader runs it: the tour, pictures of one's own, a conversation, and no traceback.

The model is random and tiny, so that its answers say nothing: what is held to something are pictures and numbers.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m6_multimodal_pd import (
    CacheConfig,
    DisaggregationConfig,
    ModelConfig,
    MultimodalConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
    demo,
)
from m6_multimodal_pd.demo_parts import batch, drawing, picture_view, positions, second_turn, stage
from m6_multimodal_pd.demo_parts.drawing import CELL, CELLS, COLOURS, OUTLINES, Shape
from m6_multimodal_pd.demo_parts.notes import Notes
from m6_multimodal_pd.demo_parts.picture_view import HALF, Shown, half_blocks
from m6_multimodal_pd.demo_parts.tour import prompt_of
from tests.m6_multimodal_pd.engines import MakeEngine, setting
from tests.m6_multimodal_pd.seeing import SHOWN, asking, picture
from training import scenes

GREY, RED, BLUE, GREEN = (200, 200, 200), (255, 0, 0), (0, 0, 255), (0, 255, 0)


def words(text: str) -> str:
    """A text without its line breaks: the console makes them where it likes."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A screen of 80 columns, without waiting; the demo's number of threads stays in its test."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(batch, "PACE", 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a picture, a clip as a file and as a folder, a text, and a picture that was cut off."""
    frames = drawing.clip(stage.MOVING, frames=4)
    frames[0].save(tmp_path / "picture.png")
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=500)
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{number}.png")
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    (tmp_path / "cut.png").write_bytes((tmp_path / "picture.png").read_bytes()[:100])
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    return tmp_path


def settings(**changes: Any) -> stage.Settings:
    """Those of a tour without flags, with two tokens for each answer."""
    given: dict[str, Any] = {
        "model": ModelConfig(),
        "scheduler": SchedulerConfig(),
        "cache": CacheConfig(),
        "speculative": SpeculativeConfig(),
        "multimodal": MultimodalConfig(),
        "trace": TraceConfig(),
        "params": SamplingParams(max_tokens=2),
        "num_texts": 2,
        "num_answers": 1,
        "live": True,
    }
    return stage.Settings(**given | changes)


def screen(**changes: Any) -> Console:
    """A terminal of 80 x 24 with all colours, that keeps what is printed."""
    given: dict[str, Any] = {"width": 80, "height": 24, "color_system": "truecolor", "force_terminal": True}
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), legacy_windows=False, **given | changes)
    console.no_color = False
    return console


def printed(console: Console) -> str:
    """What was printed on it."""
    file: Any = console.file
    file.flush()
    return file.buffer.getvalue().decode()


# --- the tour ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tour(seeing_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """What the tour prints into a pipe, and its trace."""
    trace = tmp_path_factory.mktemp("tour") / "trace.jsonl"
    console = Console(file=io.StringIO(), width=80, highlight=False)
    argv = ["--model", str(seeing_directory), "--device", "cpu", "--max-tokens", "3", "--page-size", "1"]
    demo.run(demo.make_parser().parse_args([*argv, "--threads", "1", "--trace-file", str(trace)]), console)
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    file: Any = console.file
    return file.getvalue(), events


def test_the_tour_shows_pictures_positions_and_a_second_turn(tour: tuple[str, list[dict[str, Any]]]) -> None:
    out, events = tour
    assert "\x1b" not in out and HALF not in out and max(map(len, out.splitlines())) <= 80
    said = words(out)
    for part in (
        "7 requests, handed in at the same time: 3 pictures and 1 clip, each with a question, and 3 questions without",
        "This output has no colours, so pictures are described here and not drawn.",
        "picture [a big red circle at the center] question Describe the picture. answer",
        "clip [4 frames: a big green square moves from left to right]",
        "7 of 7 requests got the same answer, token for token",
        "tokens on average, where a step without guesses brings one.",
        " was cut: ",
        "With --pd the same requests go through a process that computes prompts",
        "The vision tower ran",
        "for 3 pictures and 1 clip",
        "its content is new, so the tower ran once",
        "What there is to see",
    ):
        assert part in said, part
    kinds = {event["event"] for event in events}
    assert {"item_received", "positions_assigned", "encoder_run", "encoder_hit", "batch", "audit"} <= kinds


def test_its_totals_are_what_the_trace_counts(tour: tuple[str, list[dict[str, Any]]]) -> None:
    out, events = tour
    runs = [event for event in events if event["event"] == "encoder_run"]
    hits = [event for event in events if event["event"] == "encoder_hit"]
    assert f"pictures and clips encoded  5, in {len(runs)} runs of the tower" in out
    assert sum(len(run["hashes"]) for run in runs) == 5
    assert f"embeddings made             {sum(run['num_tokens'] for run in runs):,}," in out
    assert f"encoder hits                {len(hits)}:" in out
    skipped = sum(event["prefix"] for event in events if event["event"] == "admit")
    assert f"prompt tokens skipped       {skipped:,} of" in out and skipped > 0


def test_the_second_turn_s_line_is_what_the_trace_says(tour: tuple[str, list[dict[str, Any]]]) -> None:
    out, events = tour
    admits = [event for event in events if event["event"] == "admit"]
    for place, title in ((7, "next turn"), (8, "other conversation"), (9, "other picture")):
        (admit,) = [event for event in admits if event["rid"] == f"req-{place}"]
        hits = [e for e in events if e["event"] == "encoder_hit" and e["rid"] == f"req-{place}"]
        runs = [e for e in events if e["event"] == "encoder_run" and f"req-{place}" in e["rids"]]
        numbers = [admit["prefix"] + admit["extend"], admit["prefix"], admit["extend"], len(runs), len(hits)]
        numbers.append(sum(run["num_tokens"] for run in runs))
        found = re.search(rf"^{title} +" + " +".join(f"{number:,}" for number in numbers) + r" +[\d.]+ ms", out, re.M)
        assert found, (title, numbers)
    said = words(out)
    assert "all of the picture among them: 0 encoder runs, and not even its embeddings were needed. - Other" in said
    assert "1 encoder hit and 0 encoder runs: its embeddings were there already. - Other picture:" in said


@pytest.mark.exhaustive
def test_a_model_that_reads_only_takes_the_part_without_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", str(TEXT_MODEL), "--max-tokens", "3", "--num-prompts", "3", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    said = words(out)
    assert err == "" and "has no vision tower: it takes texts only" in said
    assert "1. Texts in one batch" in said and "3 requests, handed in" in said and "2. What there is to see" in said
    assert "picture [" not in said and "3 of 3 requests got the same answer" in said


def test_on_a_terminal_pictures_are_drawn_and_answers_stream(make_engine: MakeEngine) -> None:
    engine, console, notes = make_engine(**setting(page_size=1)), screen(), Notes()
    engine.tracer.attach(notes)
    asks = [*stage.scenes(), stage.moving(), *stage.texts(1)]
    outputs = batch.show_batch(engine, settings(), asks, console)
    out = printed(console)
    assert out.count("slowed down to be watched") == len(notes.batches) > 1
    assert HALF in out and "38;2;220;40;40" in out and picture_view.NO_COLOURS not in out
    assert [output.request_id for output in outputs] == [f"req-{i}" for i in range(5)]
    assert sum(" ".join(batch.facts(notes, asks)).count(part) for part in ("3 pictures", "1 clip")) == 2


def test_answers_that_differ_when_asked_alone_are_counted(make_engine: MakeEngine) -> None:
    engine, alone = make_engine(**setting()), make_engine(**setting(cache="chunk"))
    asks = stage.texts(2)
    outputs = batch.show_batch(engine, settings(), asks, Console(file=io.StringIO()))
    assert "2 of 2 requests got" in str(batch.same_alone(alone, settings(), asks, outputs))
    assert "1 of 2 requests got" in str(batch.same_alone(alone, settings(), asks, [outputs[0], outputs[0]]))
    drawn = settings(params=SamplingParams(temperature=1.0, max_tokens=2))
    assert batch.same_alone(alone, drawn, asks, outputs) is None


def test_several_answers_to_the_first_picture_share_it(make_engine: MakeEngine) -> None:
    engine, notes, console = make_engine(**setting()), Notes(), Console(file=io.StringIO(), width=80)
    engine.tracer.attach(notes)
    asks = [stage.moving(), *stage.texts(1)]
    outputs = batch.show_batch(engine, settings(num_answers=3), asks, console)
    assert [len(output.outputs) for output in outputs] == [3, 1]
    assert "ran once, for 0 pictures and 1 clip" in " ".join(batch.facts(notes, asks))


@pytest.mark.parametrize(
    "changes",
    [{"color_system": None}, {"file": io.TextIOWrapper(io.BytesIO(), encoding="ascii"), "width": 80}],
    ids=["no colours", "no half block"],
)
def test_where_nothing_can_be_drawn_pictures_are_told(changes: dict[str, Any]) -> None:
    console = Console(force_terminal=True, **{"color_system": "truecolor", "file": screen().file, **changes})
    assert not picture_view.draws(console) and picture_view.draws(screen())
    assert str(Shown((picture("a", 1, 1),), "a cat").view(console, 8, 4)) == "[a cat]"


def test_a_draft_model_guesses_for_texts_only() -> None:
    drafting = settings(speculative=SpeculativeConfig(method="draft_model"), options={"priority": 1})
    assert drafting.options_of(stage.moving()) == {"priority": 1, "speculate": False}
    assert drafting.options_of(stage.texts(1)[0]) == {"priority": 1}
    assert settings().options_of(stage.moving()) == {}


# --- pictures of one's own --------------------------------------------------------------------------------------------


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
    said = words(out)
    assert err == "" and "\x1b" not in out and "question What is red?" in said
    assert "picture.png: 96 x 96 pixels]" in said and "clip.gif: 96 x 96 pixels, 4 frames of 4]" in said
    received = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert [e["modality"] for e in received if e["event"] == "item_received"] == ["image", "video"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("flags", "question"),
    [
        (["--image", "picture.png"], "Describe the picture."),
        (["--image", "picture.png", "--image", "picture.png"], "Compare the two pictures."),
        (["--video", "frames", "--video-fps", "2"], "What happens in the clip?"),
    ],
)
def test_pictures_without_a_question_are_asked_about(
    seeing_directory: Path, files: Path, capsys: pytest.CaptureFixture[str], flags: list[str], question: str
) -> None:
    argv = [str(files / flag) if (files / flag).exists() else flag for flag in flags]
    assert run_on(seeing_directory, "--trace", "off", *argv) == 0
    out = words(capsys.readouterr().out)
    assert f"question {question}" in out and "answer" in out


def test_a_conversation_is_shown_pictures(
    seeing_directory: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        f"Hello\n/image {files / 'picture.png'}\nWhat is it?\nAnd now?\n/image {files / 'nothing.png'}\n/image\n"
        f"/image {files / 'picture.png'}\n"
        f"/reset\nWhat is it?\n/video '{files / 'frames'}'\nWhat happens?\n/nonsense\n/quit\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    trace = files / "trace.jsonl"
    assert run_on(seeing_directory, "--chat", "--video-fps", "2", "--page-size", "1", "--trace-file", str(trace)) == 0
    out, err = capsys.readouterr()
    out = words(out)
    assert err == "" and out.count("it goes with the next question") == 3 and "/image needs a path" in out
    assert "forgotten" in out
    assert "InvalidMediaError: image" in out and "there is /image, /reset, /video and /quit" in out
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    brought = [(e["rid"], e["modality"]) for e in events if e["event"] == "item_received"]
    assert brought == [("req-1", "image"), ("req-2", "image"), ("req-4", "video")]
    assert len([e for e in events if e["event"] == "encoder_run"]) == 2


def test_a_question_that_failed_takes_its_pictures_with_it(
    seeing_directory: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = "word " * 1100
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {files / 'picture.png'}\n{too_long}\nHello\n"))
    trace = files / "trace.jsonl"
    assert run_on(seeing_directory, "--chat", "--trace-file", str(trace)) == 0
    assert "PromptTooLongError" in capsys.readouterr().out and "item_received" not in trace.read_text(encoding="utf-8")


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image", "nothing.png"], "nothing.png"),
        (["--image", "text.png"], "none of PNG, JPEG"),
        (["--image", "cut.png"], "cut.png"),
        (["--image", "frames"], "is a folder"),
        (["--image", "picture.png", "--image", "nothing.png", "--prompt", "x"], "nothing.png"),
        (["--image", "https://example.org/x.png"], "https: URLs are refused; --allow-url https allows them"),
        (["--video", "clip.mp4"], ".mp4 files are not read"),
        (["--video", "picture.png"], "still picture"),
        (["--video", "nothing"], "nothing"),
        (["--video", "frames", "--video-fps", "0"], "video_fps=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_picture_that_cannot_be_taken_is_one_clear_line(
    seeing_directory: Path, files: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    paths = [str(files / flag) if (files / flag).exists() else flag for flag in argv]
    assert run_on(seeing_directory, "--trace", "off", *paths) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in out + err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "/nowhere"], "/nowhere does not exist"),
        (["--model", str(TEXT_MODEL), "--image", "picture.png"], "takes texts only"),
        (["--raw", "--prompt", "x", "--image", "picture.png"], "raw"),
        (["--prompt", "x", "--video-fps", "2"], "video_fps=2.0 has no effect"),
        (["--encoder-budget", "0"], "encoder_budget=0"),
        (["--min-pixels", "9", "--max-pixels", "3"], "min_pixels=9"),
        (["--embedding-cache-bytes", "-1"], "embedding_cache_bytes=-1"),
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--chat", "--n", "2"], "n=2"),
        (["--prompt", "x", "--num-speculative-tokens", "3"], "num_speculative_tokens"),
        (["--max-num-batched-tokens", "3"], "max_num_batched_tokens=3 is less than"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--prefill", "0"], "prefill=0"),
        (["--decode", "65"], "decode=65 engines are too many"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_clear_line(
    files: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert demo.main([str(files / flag) if flag == "picture.png" else flag for flag in argv]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in out + err


def test_a_prompt_that_is_too_long_for_the_tour_is_one_clear_line(
    seeing_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on(seeing_directory, "--max-model-len", "40") == 2
    err = capsys.readouterr().err
    assert "max_model_len is 40" in err and len(err.splitlines()) == 1


def test_a_picture_in_the_home_folder_is_found_in_a_conversation(
    seeing_directory: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(files))
    monkeypatch.setattr("sys.stdin", io.StringIO("/image ~/picture.png\n/image ~nobody-here/picture.png\n"))
    assert run_on(seeing_directory, "--chat") == 0
    out = capsys.readouterr().out
    assert out.count("it goes with the next question") == 1 and out.count("InvalidMediaError") == 1


def test_every_flag_is_explained_as_it_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "m6_multimodal_pd.demo" in words(out)
    for flag in (
        *("prompt", "chat", "model", "trace-file", "temperature", "n", "load-format", "threads", "cache", "priority"),
        *("max-num-seqs", "max-num-batched-tokens", "num-prompts", "page-size", "chunked-prefill-size", "speculative"),
        *("image", "video", "video-fps", "allow-url", "min-pixels", "max-pixels", "encoder-budget"),
        "embedding-cache-bytes",
    ):
        assert f"--{flag} " in out or f"--{flag}\n" in out, flag
    assert "requests without a picture in the tour's batch; default: 3" in words(out) and "part 3" not in out


def test_the_flags_of_pictures_reach_the_engine() -> None:
    flags = "--encoder-budget 7 --embedding-cache-bytes 9 --min-pixels 1 --max-pixels 5 --allow-url file"
    assert demo.multimodal_config(demo.make_parser().parse_args(flags.split())) == MultimodalConfig(
        encoder_budget=7, embedding_cache_bytes=9, min_pixels=1, max_pixels=5, allowed_url_schemes=("file",)
    )


# --- prefill and decode apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", DisaggregationConfig()),
        ("--model somewhere", None),
        ("--prompt hello", None),
        ("--chat", None),
        ("--pd", DisaggregationConfig()),
        ("--prefill 2", DisaggregationConfig(prefill=2)),
        ("--decode 3 --transport in_process", DisaggregationConfig(decode=3, transport="in_process")),
    ],
)
def test_the_flags_of_engines_that_share_the_work(flags: str, expected: DisaggregationConfig | None) -> None:
    assert demo.disaggregation_config(demo.make_parser().parse_args(flags.split())) == expected


@pytest.mark.exhaustive
def test_an_answer_of_engines_that_share_the_work(seeing_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--model",
        str(seeing_directory),
        "--device",
        "cpu",
        "--max-tokens",
        "4",
        "--threads",
        "1",
        "--trace",
        "off",
    ]
    answers = []
    for flags in ([], ["--transport", "in_process"]):
        assert demo.main([*argv, *flags, "--prompt", "What is a KV cache?"]) == 0
        answers.append(capsys.readouterr().out.splitlines()[:2])
    assert answers[0] and answers[0] == answers[1]


# --- how pictures are drawn in a terminal -----------------------------------------------------------------------------


def test_a_character_shows_two_pixels_one_above_the_other() -> None:
    image = Image.new("RGB", (2, 2))
    for place, colour in {(0, 0): RED, (1, 0): GREEN, (0, 1): BLUE, (1, 1): GREY}.items():
        image.putpixel(place, colour)
    drawn = half_blocks(image, 2, 1)
    assert drawn.plain == HALF * 2
    assert [(span.start, span.end, span.style) for span in drawn.spans] == [
        (0, 1, Style(color=Color.from_rgb(*RED), bgcolor=Color.from_rgb(*BLUE))),
        (1, 2, Style(color=Color.from_rgb(*GREEN), bgcolor=Color.from_rgb(*GREY))),
    ]


def test_what_is_printed_is_the_upper_colour_on_the_lower() -> None:
    image = Image.new("RGB", (1, 2), RED)
    image.putpixel((0, 1), BLUE)
    console = screen()
    console.print(half_blocks(image, 1, 1))
    assert f"\x1b[38;2;255;0;0;48;2;0;0;255m{HALF}\x1b[0m" in printed(console)


def test_a_picture_fills_its_box_and_keeps_its_shape() -> None:
    lines = half_blocks(drawing.picture(*stage.ONE), 32, 16).plain.split("\n")
    assert len(lines) == 16 and {len(line) for line in lines} == {32}
    assert picture_view.fitting((96, 96), 32, 16) == (32, 32)
    assert picture_view.fitting((200, 100), 32, 16) == (32, 16)
    assert picture_view.fitting((100, 400), 32, 16) == (8, 32)
    assert picture_view.fitting((1000, 1), 32, 16) == (32, 2)


def test_a_clip_is_a_sheet_of_its_first_to_last_frames() -> None:
    frames = [Image.new("RGB", (8, 8), (10 * i, 0, 0)) for i in range(7)]
    sheet = np.asarray(picture_view.contact_sheet(frames))
    assert sheet.shape == (17, 17, 3)
    assert [sheet[y, x, 0] for y in (0, 16) for x in (0, 16)] == [0, 20, 40, 60] and sheet[8, 8].tolist() == [0] * 3
    assert picture_view.contact_sheet(frames[:2]).size == (17, 8)


@pytest.mark.parametrize(
    ("width", "height", "expected"), [(80, 24, (16, 4)), (80, 60, (32, 2)), (160, 40, (32, 4)), (20, 1000, (18, 1))]
)
def test_pictures_are_as_large_as_the_screen_allows(width: int, height: int, expected: tuple[int, int]) -> None:
    columns, per_row = batch.layout(width, height, 4, 2)
    assert (columns, per_row) == expected and per_row * (columns + 2) <= width


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", OUTLINES)
@pytest.mark.parametrize("size", drawing.RADII)
def test_a_shape_lies_in_its_cell_and_nowhere_else(form: str, size: str) -> None:
    for number, cell in enumerate(CELLS):
        pixels = np.asarray(drawing.picture(Shape(size, "blue", form, cell)))
        row, column = divmod(number, 3)
        middle = pixels[row * CELL + CELL // 2, column * CELL + CELL // 2]
        assert tuple(middle) == COLOURS["blue"]
        painted = np.argwhere((pixels != drawing.BACKGROUND).any(axis=2)) // CELL
        assert {tuple(place) for place in painted.tolist()} == {(row, column)}


def test_pictures_are_of_the_kind_that_the_checkpoint_has_learned() -> None:
    assert COLOURS == scenes.COLORS and CELLS == scenes.CELLS and set(OUTLINES) == set(scenes.SHAPES)
    assert drawing.BACKGROUND in scenes.BACKGROUNDS
    for name, (least, most) in scenes.SIZES.items():
        assert least <= drawing.RADII[name] / CELL <= most
    for form, corners in scenes.OUTLINES.items():
        ours = np.array(OUTLINES[form])
        assert len(ours) == len(corners) and np.abs(ours - np.array(corners)).max() < 1e-9


def test_edges_are_smooth_and_pictures_are_always_the_same() -> None:
    first, second = (np.asarray(drawing.picture(*stage.TWO)) for _ in range(2))
    assert np.array_equal(first, second) and first.shape == (96, 96, 3)
    assert len(np.unique(first.reshape(-1, 3), axis=0)) > 3


def test_a_clip_moves_to_the_right() -> None:
    frames = [np.asarray(frame) for frame in drawing.clip(Shape("small", "red", "star"), frames=4)]
    middles = [np.argwhere((frame != drawing.BACKGROUND).any(axis=2)).mean(axis=0) for frame in frames]
    across = [x for _, x in middles]
    assert across == sorted(across) and across[-1] - across[0] == pytest.approx(48, abs=1)
    assert max(y for y, _ in middles) - min(y for y, _ in middles) < 0.5


# --- positions --------------------------------------------------------------------------------------------------------


def ask_about(name: str) -> stage.Ask:
    """A question about one of the pictures that all tests have."""
    return stage.Ask("what is it?", (SHOWN[name],))


def traced_prompt(make_engine: MakeEngine, ask: stage.Ask) -> tuple[positions.Prompt, Any]:
    """A prompt as its events describe it, and the positions that the model gets."""
    notes = Notes()
    engine = make_engine(**setting(), trace_config=TraceConfig(readers=(notes,)))
    prompt: Any = engine.chat_prompt(ask.messages())
    output = engine.generate(prompt, SamplingParams(max_tokens=1))
    return prompt_of(ask, output, notes), prompt.multimodal_inputs


@pytest.mark.parametrize("name", ["a", "b", "c", "d", "v"])
def test_the_table_holds_the_positions_that_the_model_gets(make_engine: MakeEngine, name: str) -> None:
    prompt, inputs = traced_prompt(make_engine, ask_about(name))
    found = positions.places(prompt, str)
    item = inputs.mm_items[0]
    assert positions.positions_of(prompt.assigned).tolist() == inputs.mrope_positions.tolist()
    number = len(prompt.token_ids)
    assert [one.place for one in found] == list(range(max(item.start - 4, 0), min(item.end + 4, number)))
    for one in found:
        assert one.position == tuple(inputs.mrope_positions[:, one.place].tolist())
        assert one.is_picture == (item.start <= one.place < item.end)


def test_the_table_and_the_grids_of_a_picture_of_3_by_3(make_engine: MakeEngine) -> None:
    console = Console(file=io.StringIO(), width=80)
    (still, inputs), (clip, _) = (traced_prompt(make_engine, ask_about(name)) for name in ("a", "v"))
    prompt, start = still.token_ids, inputs.mm_items[0].start
    tokenizer = make_engine(**setting()).engine_core.input_processor.tokenizer
    positions.show_positions(still, clip, lambda token_id: str(tokenizer.decode([token_id])), console)
    file: Any = console.file
    out = file.getvalue()
    rows = re.findall(r"^ +(\d+) +<\|image_pad\|> +(\d+) +(\d+) +(\d+)", out, re.MULTILINE)
    expected = [(start + i, start, start + i // 3, start + i % 3) for i in range(9)]
    assert [tuple(map(int, row)) for row in rows] == expected
    assert re.search(rf"^{start} {start} {start} +{start} {start} {start} +{start} {start + 1} {start + 2}", out, re.M)
    said = words(out)
    assert "9 tokens of picture advance the position by 3: the block is 3 high and 3 wide" in said
    assert f"place {start + 9} has position {start + 3}" in said
    assert f"the first token of the answer has position {len(prompt) - 6}, not {len(prompt)}" in said
    assert "2 blocks of 6 tokens in its prompt" in said


def test_a_large_picture_is_shown_in_part() -> None:
    block = [positions.Place(i, "x", (0, 0, i), i < 40) for i in range(42)]
    console = Console(file=io.StringIO(), width=80)
    console.print(positions.position_table(block))
    file: Any = console.file
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + 8 + 1 + 8 + 2 and "... 24 more ..." in lines[9]


# --- the second turn --------------------------------------------------------------------------------------------------


def test_a_look_counts_what_the_engine_s_totals_count(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(page_size=1))
    looks = [second_turn.look(engine, settings(), str(i), "?", asking("a", 1)) for i in range(2)]
    looks.append(second_turn.look(engine, settings(), "2", "?", asking(5, "a")))
    stats: Any = engine.stats()
    assert [(each.num_runs, each.num_hits, each.num_embeddings) for each in looks] == [(1, 0, 9), (0, 0, 0), (0, 1, 0)]
    assert sum(each.num_cached_tokens for each in looks) == stats.num_cached_tokens > 0
    assert sum(each.num_computed for each in looks) == stats.num_prompt_tokens
    told = [second_turn.told(each) for each in looks]
    assert "the tower ran once and made 9 embeddings" in told[0] and "not even its embeddings" in told[1]
    assert "1 encoder hit and 0 encoder runs" in told[2]
