"""A chat of the demo whose conversation becomes longer than a request may be."""

import io

import pytest

from m4_radix_cache import demo


def test_a_conversation_that_becomes_too_long_is_an_error_and_may_be_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is a KV cache?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question * 3}/reset\n{question}/quit\n"))
    assert demo.main(["--chat", "--max-model-len", "64", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    before, after = out.split("forgotten")
    assert err == "" and before.count("PromptTooLongError") == 1 and "max_model_len is 64" in " ".join(before.split())
    assert "18 prompt tokens: " in after and "Error" not in after
