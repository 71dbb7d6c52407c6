"""Configuration of the server and its command line."""

import sys
from typing import Any

import pytest

from m1_single_request.errors import ConfigError
from m7_serving import __main__ as main
from m7_serving.config import ServerConfig

TIMES = [f"{name}_timeout_s" for name in ("header", "body", "write", "keep_alive", "request", "shutdown")]
SIZES = ("max_requests", "max_connections", "max_header_bytes", "max_body_bytes")


@pytest.mark.parametrize("name", [*TIMES, *SIZES])
@pytest.mark.parametrize("value", [-1, "10", None, True, float("nan"), float("inf")])
def test_a_wrong_number_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65_536),
        ("port", "80"),
        ("host", ""),
        ("host", None),
        ("host", "a" * 1000),
        ("served_model_name", ""),
        ("served_model_name", 1),
        ("allowed_media_hosts", "example.org"),
        ("allowed_media_hosts", [1]),
        ("api_key", "key"),
        ("access_log", 1),
    ],
)
def test_a_wrong_value_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


def test_a_key_is_shown_nowhere() -> None:
    assert "secret" not in repr(ServerConfig(api_key=["secret"]))
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=["secret" * 100])
    assert "secret" not in str(caught.value)


def test_every_field_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    for name in ServerConfig.__dataclass_fields__:
        assert f"--{name.removesuffix('_s').replace('_', '-')}" in text


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--port", "99999"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: port=99999") and error.count("\n") == 1


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn.loops.auto", None)
    assert main.main([]) == 2
    assert 'pip install "stepwise-llm[serve]"' in capsys.readouterr().err
