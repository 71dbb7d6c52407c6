"""Servers as processes, as a user starts them, and how to look at them from outside."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


class Server:
    """A server in a process of its own."""

    def __init__(self, *flags: str, **env: str) -> None:
        command = [sys.executable, "-m", "m7_serving", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("serving at "):
            raise RuntimeError(f"the server did not start: {self.process.communicate()}")
        self.url = line.split()[-1]
        """As clients need it, with /v1."""
        self.root = self.url.removesuffix("/v1")
        self.port = int(self.root.rpartition(":")[2])

    def metrics(self) -> dict[str, float]:
        """The values of all metrics by name, without labels."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.root}/metrics") as page:
            for line in page.read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name.partition("{")[0]] = float(value)
        return found

    def is_idle(self) -> bool:
        """Wait until no request runs or waits, and no memory is in use."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            values = self.metrics()
            if not any(values[f"sglang:{name}"] for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens")):
                return True
            time.sleep(0.02)
        return False

    def engines(self) -> list[int]:
        """Process ids of its engines."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit status and the log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, log


@contextmanager
def serving(*flags: str, **env: str) -> Iterator[Server]:
    """A server, which is killed at the end if it still runs."""
    server = Server(*flags, **env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def chat(content: Any = "What is a KV cache?", **fields: Any) -> dict[str, Any]:
    """Fields of a conversation with one question."""
    defaults = {"model": "tiny-qwen3-vl", "temperature": 0, "max_tokens": 24}
    return {**defaults, "messages": [{"role": "user", "content": content}], **fields}
