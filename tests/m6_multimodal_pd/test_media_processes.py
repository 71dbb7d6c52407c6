"""Images that other processes read: steps of others go on, and nothing but the time of an arrival changes.

A site sends each picture when the test lets it, so that what has been read when a step begins is up to the test.
"""

import base64
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from m6_multimodal_pd import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    EngineUsageError,
    InvalidMediaError,
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    LLMEngine,
    PeerLostError,
    PromptTooLongError,
    SamplingParams,
)
from m6_multimodal_pd.multimodal import media_channel, media_pool, media_process
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, check_drained, check_flushed, drain, greedy, setting
from tests.m6_multimodal_pd.gated_site import GatedSite, gated_site
from tests.m6_multimodal_pd.media_files import encoded
from tests.m6_multimodal_pd.pd_engines import Group
from tests.m6_multimodal_pd.seeing import SIDE, clip, picture, text

SHORT = greedy(5)
SIZES = {"one": (3, 3), "two": (2, 5), "three": (1, 4)}
FILES = {name: encoded(picture(name, *size)) for name, size in SIZES.items()} | {"junk": b"no picture", "huge": b""}
MANY_STEPS = 2000


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedSite]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with gated_site(FILES) as served:
        yield served


@pytest.fixture
def reading(make_engine: MakeEngine) -> Iterator[Callable[..., Any]]:
    """`reading(num_processes, **limits)`: an engine whose images are read by so many processes; closed after the test,
    when none of them may be left."""
    engines: list[Any] = []

    def make(number: int = 1, parts: Any = None, enable_overlap: bool | None = None, **multimodal: Any) -> Any:
        limits = {"num_media_processes": number, "allowed_url_schemes": ("http",), **multimodal}
        engines.append(make_engine(parts, **setting(multimodal=limits, enable_overlap=enable_overlap)))
        return engines[-1]

    yield make
    for engine in engines:
        running = processes_of(engine)
        engine.close()
        assert all(process.returncode is not None for process in running)


def processes_of(engine: Any) -> list[subprocess.Popen[bytes]]:
    """Those that run now."""
    pool = engine.engine_core.families.pool
    return [] if pool is None else [each.process for each in pool.processes]


def showing(*content: Any) -> list[dict[str, Any]]:
    """A conversation of these parts and a text."""
    return [{"role": "user", "content": [*content, text(1)]}]


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def until(engine: Any, happens: Callable[[], bool]) -> dict[str, Any]:
    """Step until something is so; the last outputs of everybody."""
    last: dict[str, Any] = {}
    for _ in range(MANY_STEPS):
        if happens():
            return last
        last |= engine.step()
        engine.engine_core.check_invariants()
    raise AssertionError("it did not happen")


def finish(engine: Any) -> dict[str, Any]:
    """Step to the end; the last output of everybody."""
    last = drain(engine, lambda stepped: stepped.engine_core.check_invariants())
    check_drained(engine)
    return last


# --- the same answers -------------------------------------------------------------------------------------------------


def images(folder: Path) -> dict[str, dict[str, Any]]:
    """Images in all forms."""
    path = folder / "one.png"
    path.write_bytes(FILES["one"])
    data = "data:image/png;base64," + base64.b64encode(FILES["two"]).decode()
    return {
        "path": image(path),
        "relative": image(os.path.relpath(path)),
        "bytes": image(bytearray(FILES["two"])),
        "data": {"type": "image_url", "image_url": {"url": data}},
        "pil": image(picture("three", 1, 4)),
        "array": image(np.asarray(picture("three", 1, 4))),
    }


def videos(folder: Path) -> dict[str, dict[str, Any]]:
    """Videos in all forms."""
    frames = folder / "frames"
    frames.mkdir()
    for number, frame in enumerate(clip("frame", 4, 2, 2)):
        frame.save(frames / f"{number}.png")
    gif = folder / "clip.gif"
    first, *others = clip("gif", 3, 2, 2)
    first.save(gif, save_all=True, append_images=others, duration=500)
    files = sorted(map(str, frames.iterdir()))
    return {
        "folder": {"type": "video", "video": frames, "video_fps": 2.0},
        "files": {"type": "video", "video": files, "video_fps": 4, "num_frames": 4},
        "frames": {"type": "video", "video": clip("frame", 4, 2, 2), "fps": None},
        "gif": {"type": "video", "video": str(gif)},
    }


def check_same(engines: Iterable[Any], conversations: list[Any]) -> None:
    """All engines give the same tokens, to the same items."""
    found: list[Any] = []
    for engine in engines:
        recorder = Recorder(engine.tracer)
        outputs = engine.generate_batch(conversations, SHORT)
        assert all(output.error is None for output in outputs.values())
        items = sorted((e.rid, e.index, e.hash, e.offsets, e.size) for e in recorder.events("item_received"))
        found.append(([(o.prompt_token_ids, o.token_ids) for o in outputs.values()], items))
    assert all(own == found[0] for own in found)


def test_every_form_of_an_image_gives_the_same_tokens(reading: Any, make_engine: MakeEngine, tmp_path: Path) -> None:
    """Several in one prompt come in the order of the messages, whichever was read first."""
    named = images(tmp_path)
    several = showing(named["data"], named["path"], text(2), named["pil"])
    engines = make_engine(**setting()), reading(2), reading(enable_overlap=True)
    check_same(engines, [several, *(showing(part) for part in named.values())])


def test_a_path_is_that_of_the_caller_wherever_the_process_was_started(
    reading: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = reading()
    wanted = engine.generate(showing(image(FILES["one"])), SHORT).token_ids
    (tmp_path / "here.png").write_bytes(FILES["one"])
    monkeypatch.chdir(tmp_path)
    assert engine.generate(showing(image("here.png")), SHORT).token_ids == wanted


@pytest.mark.exhaustive
def test_every_form_of_a_video_gives_the_same_tokens(reading: Any, make_engine: MakeEngine, tmp_path: Path) -> None:
    """A process imports torch for it."""
    named = videos(tmp_path)
    several = showing(named["gif"], image(FILES["one"]), text(2), named["files"])
    check_same((make_engine(**setting()), reading()), [several, *(showing(part) for part in named.values())])


def test_several_answers_of_one_image_are_those_of_its_seed(reading: Any, make_engine: MakeEngine) -> None:
    params = SamplingParams(n=3, max_tokens=4, temperature=1.0)
    engines = make_engine(**setting()), reading()
    for request_id in (None, "named"):
        found = [
            [o.token_ids for o in engine.generate(showing(image(FILES["one"])), params, request_id=request_id).outputs]
            for engine in engines
        ]
        assert found[0] == found[1] and len(found[0]) == 3


# --- steps of others go on --------------------------------------------------------------------------------------------


def test_a_text_overtakes_an_image_that_is_being_read(reading: Any, site: GatedSite, make_engine: MakeEngine) -> None:
    engine = reading()
    recorder = Recorder(engine.tracer)
    assert not processes_of(engine)
    engine.add_request(showing(site.part("one")), SHORT, request_id="image")
    engine.add_request([5, 6, 7], SHORT, request_id="text")
    site.await_asked("one")
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running) == (2, 0)
    last = until(engine, lambda: not engine.engine_core.is_unfinished("text"))
    assert last["text"].finished and "image" not in last
    assert engine.has_unfinished_requests() and engine.stats().num_waiting == 1
    assert engine.step() == {} and not engine.flush_cache()
    with pytest.raises(EngineUsageError):
        engine.update_weights(engine.config.model.model)
    num_steps = engine.stats().num_steps
    assert engine.step() == {} and engine.stats().num_steps == num_steps, "to wait for images is no step"
    site.release("one")
    assert (
        finish(engine)["image"].token_ids
        == make_engine(**setting()).generate(showing(image(FILES["one"])), SHORT).token_ids
    )
    (awaited,) = recorder.events("media_awaited")
    assert (awaited.rid, awaited.num_items) == ("image", 1)
    assert [event.rid for event in recorder.events("request_added")] == ["text", "image"]


def test_images_that_were_read_in_another_order_join_as_they_come(reading: Any, site: GatedSite) -> None:
    """Of those that are there when a step begins, the first one that arrived is the first one."""
    engine = reading(3)
    recorder = Recorder(engine.tracer)
    for name in SIZES:
        engine.add_request(showing(site.part(name)), SHORT, request_id=name)
        site.await_asked(name)
    site.release("two")
    until(engine, lambda: len(recorder.events("item_received")) == 1)
    site.release("one", "three")
    assert all(output.error is None for output in finish(engine).values())
    assert recorder.events("request_added")[0].rid == "two"
    assert site.most_at_once == 3


def test_a_process_has_one_image_at_a_time(reading: Any, site: GatedSite) -> None:
    engine = reading(1)
    site.release(*SIZES)
    outputs = engine.generate_batch([showing(site.part(name), site.part("one")) for name in SIZES], SHORT)
    assert all(output.error is None for output in outputs.values())
    assert site.most_at_once == 1 and len(processes_of(engine)) == 1 and sum(site.asked.values()) == 6


# --- what cannot be used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([{"type": "image"}], InvalidMediaError),
        ([image("file:///etc/passwd")], InvalidMediaError),
        ([{"type": "video", "video": b"GIF", "fps": 0}], InvalidMediaError),
        ([image(b"")], InvalidMediaError),
        ([image(bytes(2000))], InvalidMediaError),
        ([image(torch.zeros(3, 4, 4))], InvalidMediaError),
        ([image(picture("wide", 2, 9))], InvalidMediaError),
        ([image(FILES["one"])] * 5, InvalidMediaError),
        ([{"type": "sound"}], InvalidPromptError),
    ],
    ids="no-source file-url options no-bytes too-large tensor-shape picture-too-wide too-many kind".split(),
)
def test_what_needs_no_reading_is_refused_at_once(reading: Any, content: list[Any], error: type[Exception]) -> None:
    engine = reading(max_items=4, max_file_bytes=1999, max_image_pixels=500)
    recorder = Recorder(engine.tracer)
    with pytest.raises(error):
        engine.add_request(showing(*content), SHORT)
    assert recorder.records == [] and not processes_of(engine) and not engine.has_unfinished_requests()


def test_parameters_are_checked_at_once(reading: Any) -> None:
    engine = reading()
    one = showing(image(FILES["one"]))
    with pytest.raises(InvalidParamsError):
        engine.add_request(one, SamplingParams(stop_token_ids=(10**6,)))
    with pytest.raises(InvalidRequestError):
        engine.add_request(one, SHORT, cache_salt="")
    with pytest.raises(PromptTooLongError):
        engine.add_request(showing(image(FILES["one"]), {"type": "text", "text": "red " * 5000}), SHORT)
    assert not processes_of(engine) and not engine.has_unfinished_requests()


UNUSABLE: dict[str, dict[str, Any]] = {
    "junk": image(FILES["junk"]),
    "no file": image("/nowhere/x.png"),
    "cut off": image(FILES["one"][:-40]),
    "too many pixels": image(encoded(picture("wide", 9, 9))),
    "too long": image(encoded(picture("long", 1, 1).resize((201, 1)))),
    "no clip": {"type": "video", "video": FILES["one"]},
    "bad base64": {"type": "image_url", "image_url": "data:image/png;base64,AAA="},
}


def test_an_image_that_cannot_be_used_ends_its_request(reading: Any, make_engine: MakeEngine) -> None:
    """With the error that a call raises which reads it itself; the requests beside it go on."""
    limits = {"max_image_pixels": (9 * SIDE) ** 2 - 1}
    plain, engine = make_engine(**setting(multimodal=limits)), reading(**limits)
    engine.add_request([5, 6, 7], SHORT, request_id="text")
    for name, part in UNUSABLE.items():
        engine.add_request(showing(part), SHORT, request_id=name)
        engine.add_request(showing(image(FILES["two"]), part), SamplingParams(n=2), request_id=f"{name}, n=2")
    last = finish(engine)
    assert len(last["text"].token_ids) == 5
    for name, part in UNUSABLE.items():
        for rid, content in {name: [part], f"{name}, n=2": [image(FILES["two"]), part]}.items():
            with pytest.raises(InvalidMediaError) as raised:
                plain.add_request(showing(*content), SHORT)
            output = last[rid]
            assert {one.finish_reason for one in output.outputs} == {"error"} and not output.token_ids
            assert type(output.error) is InvalidMediaError and str(output.error) == str(raised.value)
    assert engine.generate(showing(UNUSABLE["junk"]), SHORT, request_id="junk").error is not None
    assert [o.error is None for o in engine.generate_batch([showing(UNUSABLE["junk"]), [5, 6]], SHORT).values()] == [
        False,
        True,
    ]
    check_flushed(engine)


def test_a_prompt_that_is_too_long_with_its_images_ends_when_that_is_known(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=40, **setting(multimodal={"num_media_processes": 1}))
    three = [image(encoded(picture(name, 4, 4))) for name in "abc"]
    asked = {"by images": three, "by text": three[:2], "fits": three[:1]}
    for rid, content in asked.items():
        engine.add_request(showing(*content), SHORT, request_id=rid)
    last = finish(engine)
    assert "images and videos of the messages are 48 tokens" in str(last["by images"].error)
    for rid in ("by images", "by text"):
        assert isinstance(last[rid].error, PromptTooLongError), rid
    assert last["fits"].error is None
    engine.close()


# --- ends while an image is read --------------------------------------------------------------------------------------


def test_an_abort_while_an_image_is_read(reading: Any, make_engine: MakeEngine, site: GatedSite) -> None:
    """It is reported once, and what arrives later is nobody's: not even of a request with the same id."""
    engine = reading(enable_overlap=True)
    engine.add_request([5, 6, 7], greedy(40), request_id="text")
    for rid in ("first", "behind"):
        engine.add_request(showing(site.part("one")), SHORT, request_id=rid)
    site.await_asked("one")
    engine.step()
    assert engine.abort_request("first") and not engine.abort_request("first") and engine.abort_request("behind")
    last: dict[str, Any] = {}
    until(engine, lambda: bool(last.update(engine.step()) or {"first", "behind"} <= last.keys()))
    assert [last[rid].outputs[0].finish_reason for rid in ("first", "behind")] == ["abort", "abort"]
    engine.add_request(showing(site.part("two")), SHORT, request_id="first")
    site.release("one", "two")
    last = finish(engine)
    wanted = make_engine(**setting()).generate(showing(image(FILES["two"])), SHORT).token_ids
    assert last["first"].token_ids == wanted and len(last["text"].token_ids) == 40
    assert site.asked["one"] == 1, "what waited for a process is not read any more"
    check_flushed(engine)


def test_an_aborted_image_does_not_keep_the_next_one_from_its_process(reading: Any, site: GatedSite) -> None:
    engine = reading()
    recorder = Recorder(engine.tracer)
    for rid, name in {"slow": "one", "next": "two"}.items():
        engine.add_request(showing(site.part(name)), SHORT, request_id=rid)
    site.await_asked("one")
    (process,) = processes_of(engine)
    site.release("two")
    assert engine.abort_request("slow") and process.returncode == -9
    last = finish(engine)
    assert last["slow"].outputs[0].finish_reason == "abort" and last["next"].error is None
    assert recorder.events("media_process_lost") == []


def test_a_closed_stream_and_a_dropped_one_abort_their_requests(reading: Any, site: GatedSite) -> None:
    engine = reading()
    streams = [engine.stream(showing(site.part("one")), SHORT) for _ in range(2)]
    streams.pop().close()
    streams.clear()
    gc.collect()
    assert finish(engine) == {} and engine.stats().num_finished == {"abort": 2}


def test_the_ids_of_a_request_that_waits_are_taken(reading: Any, site: GatedSite) -> None:
    engine = reading()
    engine.add_request(showing(site.part("one")), SamplingParams(n=2, max_tokens=3), request_id="r")
    for rid in ("r", "r/0", "r/1"):
        with pytest.raises(DuplicateRequestError):
            engine.add_request([5, 6], SHORT, request_id=rid)
        with pytest.raises(DuplicateRequestError):
            engine.add_request(showing(site.part("one")), SHORT, request_id=rid)
    assert engine.abort_request("r")
    ended = engine.step()["r"]
    assert ended.finished and {one.finish_reason for one in ended.outputs} == {"abort"}
    engine.add_request([5, 6], SHORT, request_id="r/1")
    assert len(finish(engine)["r/1"].token_ids) == 5


def test_a_part_that_breaks_a_step_ends_them_too(reading: Any, site: GatedSite) -> None:
    engine = reading()
    engine.add_request(showing(site.part("one")), SHORT, request_id="image")
    engine.add_request([5, 6, 7], SHORT, request_id="text")
    schedule, engine.engine_core.scheduler.schedule = engine.engine_core.scheduler.schedule, lambda: 1 // 0
    outputs = engine.step()
    assert outputs.keys() == {"image", "text"} and all(output.error is not None for output in outputs.values())
    engine.engine_core.scheduler.schedule = schedule
    site.release("one")
    assert engine.generate(showing(site.part("one")), SHORT).error is None and not engine.has_unfinished_requests()


def test_a_request_that_a_part_rejects_after_its_image_is_read_ends_alone(reading: Any, site: GatedSite) -> None:
    """The part raises in the step in which three come; the others run in the same step."""
    engine = reading(3)
    for name in SIZES:
        engine.add_request(showing(site.part(name)), SHORT, request_id=name)
        site.await_asked(name)
    scheduler = engine.engine_core.scheduler
    add_request = scheduler.add_request

    def add(request: Any) -> None:
        if request.request_id == "one" and request.multimodal_inputs is not None:
            raise KeyError("not this one")
        add_request(request)

    scheduler.add_request = add
    site.release(*SIZES)
    last = finish(engine)
    assert isinstance(last["one"].error, KeyError) and last["two"].error is None and last["three"].error is None
    check_flushed(engine)


@pytest.mark.parametrize("is_group", [False, True])
def test_an_engine_that_died_while_it_waited_says_so(
    reading: Any, seeing_directory: Path, site: GatedSite, monkeypatch: pytest.MonkeyPatch, is_group: bool
) -> None:
    """The engine is dead after a second Ctrl-C in a step; a third one, while that ends the requests, leaves them."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    limits = {"num_media_processes": 1, "allowed_url_schemes": ("http",)}
    with ExitStack() as stack:
        if is_group:
            engine = stack.enter_context(Group(seeing_directory, **setting(multimodal=limits))).engine
        else:
            engine = reading()
        stream = engine.stream(showing(site.part("one")), SHORT)
        engine.add_request(showing(site.part("one")), SHORT)
        pool = engine.engine_core.families.pool
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pool, "receive", interrupt)
            patch.setattr(pool, "cancel", interrupt)
            engine.step()
        assert engine.engine_core.families.reading
        for call in (engine.step, lambda: next(stream), lambda: engine.generate([5, 6], SHORT)):
            with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
                call()


# --- processes that end -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_an_image_whose_second_process_is_killed_ends_its_request(reading: Any, site: GatedSite) -> None:
    engine = reading()
    for rid, name in {"bad": "one", "good": "two"}.items():
        engine.add_request(showing(site.part(name)), SHORT, request_id=rid)
    for attempt in (1, 2):
        site.await_asked("one", attempt)
        (process,) = processes_of(engine)
        process.send_signal(signal.SIGKILL)
        last = until(engine, lambda killed=process: killed not in processes_of(engine))
    site.release("two")
    last |= finish(engine)
    assert isinstance(last["bad"].error, PeerLostError) and "image 0 of message 0" in str(last["bad"].error)
    assert last["good"].error is None and site.asked["one"] == 2
    check_flushed(engine)


@pytest.mark.exhaustive
def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_replaced(reading: Any, site: GatedSite) -> None:
    """That counts for no image: if the next process is killed, too, there is a third one."""
    engine = reading()
    recorder = Recorder(engine.tracer)
    wanted = engine.generate(showing(image(FILES["one"])), SHORT).token_ids
    (process,) = processes_of(engine)
    process.send_signal(signal.SIGKILL)
    process.wait()
    engine.add_request(showing(site.part("one")), SHORT, request_id="image")
    site.await_asked("one")
    (process,) = processes_of(engine)
    process.send_signal(signal.SIGKILL)
    site.release("one")
    assert finish(engine)["image"].token_ids == wanted
    assert [(e.what, e.status) for e in recorder.events("media_process_lost")] == [
        (None, -9),
        ("image 0 of message 0", -9),
    ]


NO_MESSAGES = {
    "no bytes": ([4], b""),
    "no size": (["x"], b"junk"),
    "no message": ([10], b"\x81\xa4type\xa3New"),
}
"""Sizes of frames, and the frames."""


@pytest.mark.parametrize(("sizes", "content"), NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_process_that_sends_no_message_is_a_lost_one(
    reading: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[Any], content: bytes
) -> None:
    """Something that it calls may write to its socket."""
    script = tmp_path / "process.py"
    script.write_text(
        "import socket, sys, tempfile\n"
        "connection = socket.socket(fileno=int(sys.argv[1]))\n"
        "file = tempfile.TemporaryFile()\n"
        f"file.write({content!r}); file.flush()\n"
        f"socket.send_fds(connection, [{msgspec.msgpack.encode(sizes)!r}], [file.fileno()])\n"
        "while connection.recv(1 << 20): pass\n"
    )
    engine = reading()
    recorder = Recorder(engine.tracer)
    monkeypatch.setattr(media_process, "__file__", str(script))
    engine.add_request([5, 6, 7], SHORT, request_id="text")
    engine.add_request(showing(image(FILES["one"])), SHORT, request_id="image")
    last = finish(engine)
    assert isinstance(last["image"].error, PeerLostError) and "for the second time" in str(last["image"].error)
    assert last["text"].error is None and len(recorder.events("media_process_lost")) == 2
    monkeypatch.undo()
    assert engine.generate(showing(image(FILES["one"])), SHORT).error is None


@pytest.mark.exhaustive
def test_without_memory_for_a_message_its_request_ends(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has nothing to do with it, and reads the next image."""
    engine = reading()
    recorder = Recorder(engine.tracer)
    one = showing(image(FILES["one"]))
    assert engine.generate(one, SHORT).error is None
    (process,) = processes_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(media_channel, "memory_file", no_memory)
        error = engine.generate(one, SHORT).error
    assert isinstance(error, PeerLostError) and "it cannot go to another process: [Errno 28]" in str(error)
    assert engine.generate(one, SHORT).error is None
    assert processes_of(engine) == [process] and recorder.events("media_process_lost") == []


def no_memory() -> Any:
    raise OSError(errno.ENOSPC, "no memory")


def test_without_memory_for_its_settings_no_process_is_left(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reading()
    started: list[Any] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(media_channel, "memory_file", no_memory)
    error = engine.generate(showing(image(FILES["one"])), SHORT).error
    assert isinstance(error, PeerLostError) and "no process can be started" in str(error)
    assert all(process.returncode is not None for process in started) and not processes_of(engine)


@pytest.mark.exhaustive
def test_without_another_process_the_request_ends(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reading()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    error = engine.generate(showing(image(FILES["one"])), SHORT).error
    assert isinstance(error, PeerLostError) and "no process can be started" in str(error)
    monkeypatch.undo()
    assert engine.generate(showing(image(FILES["one"])), SHORT).error is None


def test_a_process_that_reads_too_long_is_a_lost_one(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to start."""
    engine = reading()
    engine.engine_core.families.pool.longest_s = 0.001
    error = engine.generate(showing(image(FILES["one"])), SHORT).error
    assert isinstance(error, PeerLostError) and "for the second time: it has read for more than 0.001 s" in str(error)
    assert not engine.has_unfinished_requests() and not processes_of(engine)


@pytest.mark.exhaustive
def test_closing_ends_processes_in_the_middle_of_an_image(reading: Any, site: GatedSite) -> None:
    """One of them is stopped."""
    engine = reading(2)
    for name in SIZES:
        engine.add_request(showing(site.part(name)), SHORT)
    site.await_asked("one")
    running = processes_of(engine)
    running[0].send_signal(signal.SIGSTOP)
    engine.close()
    assert [process.returncode for process in running] == [-9, -9]


@pytest.mark.exhaustive
def test_an_engine_that_is_dropped_ends_its_processes(seeing_directory: Path, site: GatedSite) -> None:
    limits = {"num_media_processes": 1, "allowed_url_schemes": ("http",)}
    engine: Any = LLMEngine(seeing_directory, **setting(multimodal=limits))
    engine.add_request(showing(site.part("one")), SHORT)
    (process,) = processes_of(engine)
    del engine
    gc.collect()
    assert process.returncode is not None


# --- the process itself -----------------------------------------------------------------------------------------------


def test_a_process_imports_neither_torch_nor_transformers() -> None:
    """They would take it ten times as long to start, and ten times the memory."""
    program = (
        f"import runpy, sys; names = runpy.run_path({media_process.__file__!r}); names['skip_package_inits'](); "
        "from m6_multimodal_pd.multimodal import media_channel, media_reader; "
        "sys.exit(sorted({'torch', 'transformers', 'zmq', 'jinja2'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, env={**os.environ, "PYTHONPATH": ""})


def test_an_image_that_was_read_keeps_no_descriptor_open() -> None:
    """Hundreds of them may wait, and a process may have 1,024. They can be written to."""
    pixels, (one, other) = np.asarray(picture("one", 3, 3)), socket.socketpair()
    with one, other:
        before = os.listdir("/dev/fd")
        for memory_of in (media_pool.mapped, media_channel.read):
            media_channel.send(one, media_channel.ReadPicture("it", Picture(pixels)))
            found = media_channel.receive(other, media_channel.ToProcess, memory_of).part.pixels
            assert os.listdir("/dev/fd") == before and np.array_equal(found, pixels)
            found[:] = 0


def test_processes_and_a_reader_of_ones_own_are_refused(reading: Any) -> None:
    class Own(MediaReader):
        pass

    with pytest.raises(ConfigError, match="num_media_processes has no effect on a media_reader of your own"):
        reading(1, {"media_reader": Own})
    assert reading(0, {"media_reader": Own}).generate(showing(image(FILES["one"])), SHORT).error is None


# --- a group ----------------------------------------------------------------------------------------------------------


def test_a_group_reads_images_at_its_router(seeing_directory: Path, make_engine: MakeEngine, site: GatedSite) -> None:
    limits = {"num_media_processes": 1, "allowed_url_schemes": ("http",)}
    wanted = make_engine(**setting()).generate(showing(image(FILES["one"])), SHORT).token_ids
    with Group(seeing_directory, **setting(multimodal=limits)) as group:
        for rid in ("image", "aborted"):
            group.engine.add_request(showing(site.part("one")), SHORT, request_id=rid)
        group.engine.add_request([5, 6, 7], SHORT, request_id="text")
        site.await_asked("one")
        group.until(lambda: "text" in group.last and group.last["text"].finished)
        assert group.engine.stats().num_waiting == 2 and not group.engine.flush_cache()
        assert group.engine.abort_request("aborted")
        group.engine.add_request(showing(image(FILES["junk"])), SHORT, request_id="junk")
        site.release("one")
        last = group.run()
        assert last["image"].token_ids == wanted
        assert last["aborted"].outputs[0].finish_reason == "abort"
        assert isinstance(last["junk"].error, InvalidMediaError)
        running = processes_of(group.engine)
        assert not any(each.core.families.pool.processes for each in group.links.engines.values())
    assert running and all(process.returncode is not None for process in running)
