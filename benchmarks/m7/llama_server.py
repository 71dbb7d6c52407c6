"""Sixteen streams of this server beside those of llama.cpp's `llama-server`, of one model in bfloat16.

It runs where `llama-server` is on the PATH and the package gguf is installed; else the reason is printed. It builds in
minutes, for example from the source of llama-cpp-python:

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server --parallel
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks import BenchmarkError, Row
from benchmarks.lesson import SEED
from benchmarks.m7.measures import CLIENT, NUM_STREAMS, PROMPT_TOKENS, SERVER, Process, in_turns_of, row_of, with_words
from benchmarks.machine import LoadMeter
from benchmarks.peers.models import model_path

START_S = 120.0


def beside_llama_server(folder: Path, num_tokens: int, rounds: int, *, threads: int = 2) -> Row:
    """Measure both servers in turns with the raw client. `folder`: for the model, which is written once."""
    program = shutil.which("llama-server")
    if program is None:
        return {"reason": "there is no llama-server on the PATH"}
    try:
        theirs = model_path(folder, "0.6B", "llama-cpp", None, sys.executable)
    except subprocess.CalledProcessError as error:
        return {"reason": f"the model cannot be written as GGUF: {error}"}
    random = Random(SEED)
    with ExitStack() as stack, LoadMeter() as meter:
        own = Path(stack.enter_context(TemporaryDirectory())) / "0.6B"
        written = model_path(folder, "0.6B", "stepwise", None, sys.executable).absolute()
        ours = with_words(Path(shutil.copytree(written, own, copy_function=os.symlink)))
        start = lambda *command: stack.enter_context(Process(*command))  # noqa: E731
        server = start(*SERVER, "--model", str(ours), "--dtype", "bfloat16", "--threads", str(threads))
        length = NUM_STREAMS * (PROMPT_TOKENS + num_tokens + 16)
        options = ["--parallel", str(NUM_STREAMS), "--ctx-size", str(length), "--threads", str(threads)]
        urls = {
            "stepwise": server.line().split()[-1],
            "llama": stack.enter_context(running([program, "--model", str(theirs), *options])),
        }
        clients = {name: start(*CLIENT, "raw", url) for name, url in urls.items()}
        found = in_turns_of(clients, random, num_tokens, rounds)
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stderr
    return row_of(found, num_tokens, meter) | {"version": (re.findall(r"version: (\S+)", version) or ["unknown"])[0]}


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Run `llama-server` at a free port, and yield its URL once it answers. Raises `BenchmarkError` if it does not."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            time.sleep(0.5)
            try:
                urllib.request.urlopen(f"{url}/health", timeout=START_S).close()
            except OSError as error:  # it is still loading
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkError(f"llama-server does not answer: {error}") from error
            else:
                break
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait()
