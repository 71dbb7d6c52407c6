"""Engines that are started by hand: keys in a file of one's own, engines that join, work, end, and join again."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from m6_multimodal_pd import (
    CacheConfig,
    ConfigError,
    DisaggregationConfig,
    EngineLostError,
    LLMEngine,
    SamplingParams,
    pd,
)
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys, write_keys
from m6_multimodal_pd.disaggregation.runtime.shared_memory import segment_directory
from notebooks.shapes import Shape, picture as drawn
from tests.m6_multimodal_pd.processes import by_hand, free_address

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
PARAMS = SamplingParams(max_tokens=8)
MEMORY = CacheConfig(page_size=16, max_total_tokens=1024)


def test_keys_are_their_owner_s_alone_and_come_back_as_they_were(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o600
    found = read_keys(keys)
    assert (found.router.trusted, found.engines.trusted) == (found.engines.public, found.router.public)
    assert len({found.router.secret, found.engines.secret, found.router.public, found.engines.public}) == 4
    with pytest.raises(ConfigError, match="cannot be written"):
        write_keys(keys)
    assert read_keys(keys) == found


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"router": {}, "engines": {}}', "\0", '{"\xff'])
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no file of keys"):
        read_keys(path)


def test_keys_that_others_can_read_are_refused(keys: Path, tmp_path: Path) -> None:
    keys.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_keys(keys)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": "tcp://127.0.0.1:*"}, "go together"),
        ({"key_file": "keys"}, "go together"),
        ({"address": "tcp://127.0.0.1:*", "key_file": "keys", "transport": "in_process"}, "not started by hand"),
    ],
)
def test_configurations_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DisaggregationConfig(**values)


def test_where_nobody_joins_that_is_said(keys: Path) -> None:
    group = DisaggregationConfig(address="tcp://127.0.0.1:*", key_file=keys, decode=2, start_timeout_s=0.2)
    with pytest.raises(EngineLostError, match="1 for prefill and 2 for decode did not join"):
        LLMEngine(disaggregation_config=group)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prefill", "--join", "tcp://127.0.0.1:1", "--keys", "nothing"], "cannot be read"),
        (["router", "--listen", "tcp://127.0.0.1:1", "--keys", "nothing", "--prompt", "x"], "cannot be read"),
        (["keys", "/nowhere/at/all"], "cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pd.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in out + err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("decode", "prompt chat n trace trace-file chrome-trace player image video temperature pd transport"),
        ("router", "pd transport devices"),
    ],
)
def test_a_flag_without_effect_is_neither_listed_nor_taken(
    command: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pd.main([command, "--help"])
    listed = set(re.findall(r"^  .*?--([a-z-]+)", capsys.readouterr().out, re.M))
    assert {"keys", "model", "page-size", "prefill"} <= listed and not listed & set(flags.split())
    with pytest.raises(SystemExit) as caught:
        pd.main([command, "--join" if command == "decode" else "--listen", "x", "--keys", "x", "--pd"])
    assert caught.value.code == 2 and "unrecognized arguments: --pd" in capsys.readouterr().err


def test_keys_are_made_by_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert pd.main(["keys", str(tmp_path / "made.json")]) == 0
    assert "keep it to yourself" in " ".join(capsys.readouterr().out.split())
    assert set(json.loads((tmp_path / "made.json").read_text())) == {"router", "engines"}


@pytest.mark.exhaustive
def test_engines_join_answer_and_end_when_they_are_told_or_their_router_does(keys: Path) -> None:
    shown = {"type": "image", "image": drawn(Shape("big", "red", "circle", "center"))}
    about = [{"role": "user", "content": [shown, {"type": "text", "text": "Describe the picture."}]}]
    with LLMEngine(cache_config=MEMORY) as engine:
        expected, described = engine.chat(QUESTION, PARAMS).text, engine.chat(about, PARAMS).text
    address, before = free_address(), {path.name for path in segment_directory().glob("stepwise-hand*")}
    group = DisaggregationConfig(address=address, key_file=keys, start_timeout_s=60)
    with by_hand("prefill", address, keys) as prefill, by_hand("decode", address, keys) as decode:
        with LLMEngine(cache_config=MEMORY, disaggregation_config=group) as engine:
            assert engine.chat(QUESTION, PARAMS).text == expected
            assert engine.chat(about, PARAMS).text == described, "by the model that sees"
            decode.send_signal(signal.SIGINT)
            assert decode.wait(60) == 0
            assert isinstance(engine.chat(QUESTION, PARAMS).error, EngineLostError)
            with (
                by_hand("decode", address, keys, "--page-size", "8") as misfit,
                by_hand("decode", address, keys) as another,
            ):
                core: Any = engine.engine_core
                while not core.router.of_role("decode") or misfit.poll() is None:
                    core.router.listen(0.1)
                    assert another.poll() is None, another.communicate()
                assert misfit.returncode == 2 and len(core.router.of_role("decode")) == 1
                assert misfit.stdout is not None
                said = " ".join(misfit.stdout.read().split())
                assert "does not take it, its page_size is 8, and that of prefill-" in said and "Traceback" not in said
                assert engine.chat(QUESTION, PARAMS).text == expected
                engine.close()
                assert another.wait(60) == 0
        assert prefill.wait(60) == 0
    assert {path.name for path in segment_directory().glob("stepwise-hand*")} <= before


@pytest.mark.exhaustive
def test_an_engine_that_is_stopped_for_long_is_replaced_and_ends_when_it_goes_on(keys: Path) -> None:
    """It finds no connection then, and is not half a member."""
    address = free_address()
    group = DisaggregationConfig(address=address, key_file=keys, start_timeout_s=60, heartbeat_timeout_s=3.0)
    with (
        by_hand("prefill", address, keys) as prefill,
        by_hand("decode", address, keys) as stopped,
        LLMEngine(cache_config=MEMORY, disaggregation_config=group) as engine,
    ):
        router: Any = engine.engine_core.router  # type: ignore[attr-defined]
        expected, began = engine.chat(QUESTION, PARAMS).text, time.monotonic()
        stopped.send_signal(signal.SIGSTOP)
        output = engine.chat(QUESTION, SamplingParams(max_tokens=200, ignore_eos=True))
        assert isinstance(output.error, EngineLostError) and time.monotonic() - began < 15.0
        stopped.send_signal(signal.SIGCONT)
        with by_hand("decode", address, keys):
            while not router.of_role("decode"):
                router.listen(0.1)
            assert stopped.wait(60) == 0
            assert len(router.of_role("decode")) == 1
            assert engine.chat(QUESTION, PARAMS).text == expected
        assert prefill.poll() is None
