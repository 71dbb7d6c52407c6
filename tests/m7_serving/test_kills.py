"""Processes of a server that die: clients get an error soon, the engine is started again, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.m7_serving.servers import LIMIT_S, ROOT, Server, chat, serving

pytestmark = pytest.mark.exhaustive


def eventually(holds: Callable[[], Any], timeout_s: float = LIMIT_S) -> bool:
    """Look until it holds, so long at most."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


def status_of_health(server: Server) -> int:
    try:
        with urllib.request.urlopen(f"{server.root}/health") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_an_engine_that_is_killed_ends_its_requests_with_503_and_is_started_again() -> None:
    with serving() as server, OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for _ in range(2):
            (pid,) = server.engines()
            stream = client.chat.completions.create(
                **chat(max_tokens=2000), stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(openai.APIError, match="engine"):
                list(stream)
            assert time.monotonic() - began < 5
            assert status_of_health(server) == 503
            with pytest.raises(openai.InternalServerError) as error:
                client.chat.completions.create(**chat())
            assert error.value.status_code == 503 and error.value.response.headers["Retry-After"]
            assert eventually(lambda: status_of_health(server) == 200)
            assert client.chat.completions.create(**chat()).usage
        assert server.is_idle() and len(server.engines()) == 1
        status, log = server.stop()
        assert status == 0 and "Traceback" not in log


def test_a_front_that_is_killed_takes_its_engine_along() -> None:
    with serving() as server:
        (pid,) = server.engines()
        server.process.kill()
        server.process.wait()
        assert eventually(lambda: is_gone(pid), 5.0)


def test_after_a_stop_of_the_front_requests_past_their_limit_end_and_the_others_go_on() -> None:
    """The engine computes meanwhile, with many rows, so that the old requests are still there afterwards."""
    with serving("--request-timeout", "6") as server, OpenAI(base_url=server.url, api_key="none") as client:
        old_ask = chat(max_tokens=None, extra_body={"ignore_eos": True}, n=8, stream=True)
        old = [iter(client.chat.completions.create(**old_ask)) for _ in range(4)]
        began = time.monotonic()
        assert all(next(stream) for stream in old)
        time.sleep(4.0)
        ask = chat(max_tokens=200, extra_body={"ignore_eos": True}, stream=True)
        late = client.chat.completions.create(**ask, stream_options={"include_usage": True})
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        server.process.send_signal(signal.SIGCONT)
        for stream in old:
            with pytest.raises(openai.APIError, match="longer"):
                list(stream)
        assert 6 < time.monotonic() - began < 20
        *_, last = late
        assert last.usage is not None and last.usage.completion_tokens == 200
        assert server.is_idle() and server.stop()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_request_finish(number: signal.Signals) -> None:
    with serving() as server, OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        engines = server.engines()
        asked = chat(max_tokens=300, extra_body={"ignore_eos": True})
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        next(iter(stream))
        server.process.send_signal(number)
        *_, last = stream
        assert last.usage is not None and last.usage.completion_tokens == 300
        assert server.process.wait(LIMIT_S) == 0 and all(map(is_gone, engines))


def test_without_time_a_signal_ends_a_server_at_once() -> None:
    with serving("--shutdown-timeout", "0") as server, OpenAI(base_url=server.url, api_key="none") as client:
        asked = chat(max_tokens=2000, extra_body={"ignore_eos": True})
        stream = client.chat.completions.create(**asked, stream=True)
        next(iter(stream))
        began = time.monotonic()
        assert server.stop()[0] == 0
        assert time.monotonic() - began < 4


def test_a_server_without_a_standard_input_ends_like_any_other() -> None:
    command = ["sh", "-c", 'exec "$0" -m m7_serving --port 0 <&-', sys.executable]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("serving at ")
        server.terminate()
        assert server.communicate(timeout=LIMIT_S) == ("", "") and server.returncode == 0
