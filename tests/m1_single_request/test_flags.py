"""Flags made of configuration classes: names, types, defaults and help come from the fields."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from m1_single_request.demo import make_parser
from m1_single_request.flags import config_of, field_docs, given


@dataclass(frozen=True, kw_only=True)
class Base:
    size: int | None = None
    """Size in
    tokens. None: 100 % of it.

    More about it.
    """


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    mode: Literal["fast", "slow"] = "fast"
    """The mode."""
    share: float = 0.5
    """A share."""
    words: str | Sequence[str] = ()
    """Some words."""
    kinds: tuple[str, ...] = ()
    """Some kinds."""
    chunked: bool = True
    """In `chunks`."""


FLAGS = {"things": (Config, "size=--size,-s mode share words kinds chunked")}


def parsed(*flags: str) -> argparse.Namespace:
    parser = make_parser("m9_x.demo", "Title.\n\nText of\nthe `demo`.", FLAGS)
    return parser.parse_args(flags)


def test_a_flag_has_the_type_of_its_field() -> None:
    flags = "--size 3 --mode slow --share 1 --words a --words b --kinds c --no-chunked".split()
    config = config_of(parsed(*flags), Config)
    assert config == Config(size=3, mode="slow", share=1.0, words=["a", "b"], kinds=["c"], chunked=False)  # type: ignore[arg-type]
    assert config_of(parsed("-s", "4"), Config) == Config(size=4)


def test_defaults_are_those_of_the_class_or_the_caller() -> None:
    assert config_of(parsed(), Config) == Config() and given(parsed(), Config) == {}
    assert config_of(parsed(), Config, size=7) == Config(size=7)
    assert config_of(parsed("--size", "8"), Config, size=9) == Config(size=8)


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_docs(Config)["size"] == "Size in tokens. None: 100 % of it."
    with pytest.raises(SystemExit) as caught:
        parsed("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for part in (
        "usage: python -m m9_x.demo", "Text of the demo.", "things:", "Size in tokens. Default: 100 % of it.",
        "--mode {fast,slow} The mode. Default: fast.", "A share. Default: 0.5.", "--no-chunked In chunks.",
    ):  # fmt: skip
        assert part in out, part


@pytest.mark.parametrize("flags", ["--mode medium", "--size many", "--unknown 3"])
def test_a_wrong_value_ends_with_the_usage(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*flags.split())
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err
