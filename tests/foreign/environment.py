"""An environment of its own for the tools: their dependencies are many, and some of them pin what the engine uses."""

import os
import subprocess
import sys
import time
import uuid
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
OFFLINE = {name: "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")}
MARK = "STEPWISE_FOREIGN"
LIMIT_S = 300.0
INSTALL_LIMIT_S = 1200.0
LAST_PROCESSES_S = 10.0


class ToolError(Exception):
    """A tool has failed, or has left processes. The message is the end of its output."""


class Environment:
    """A virtual environment with the extra `foreign`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def install(self) -> None:
        """Make the environment, unless an earlier call has. Raises `subprocess.SubprocessError`."""
        done = self.folder / "installed"
        if done.exists():
            return
        torch = version("torch").partition("+")[0]  # first, and the same: later requirements leave it as it is
        pip = [self.folder / "bin/python", "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "20"]
        for command in (
            [sys.executable, "-m", "venv", self.folder],
            [*pip, f"torch=={torch}"],
            [*pip, "--editable", f"{ROOT}[serve,foreign]"],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
        done.touch()

    def run(self, tool: str, *arguments: str | Path, cwd: Path, **env: str) -> str:
        """Run a tool without network, to its end, and return its output.

        Raises `ToolError` if it fails or leaves processes, and `subprocess.TimeoutExpired`.
        """
        mark = uuid.uuid4().hex
        paths = {"HF_HOME": str(cwd / "huggingface"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        log = cwd / f"{tool}-{mark}.log"  # no pipe: its end would wait for processes that are left
        with log.open("w") as output:
            ended = subprocess.run(
                [self.folder / "bin" / tool, *arguments],
                cwd=cwd,
                env=os.environ | OFFLINE | paths | env | {MARK: mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        text = log.read_text()
        if ended.returncode:
            raise ToolError(f"{tool}: exit status {ended.returncode}\n{text[-8000:]}")
        deadline = time.monotonic() + LAST_PROCESSES_S
        while left := _processes_with(mark):
            if time.monotonic() > deadline:
                raise ToolError(f"{tool} has left processes: {left}")
            time.sleep(0.1)
        return text


def _processes_with(mark: str) -> list[str]:
    """Return the commands of the processes that have inherited this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended, or is another user's
            continue
    return found
