"""Groups of ranks for tests: processes that torchrun has started, and that do one case after the other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT_S = 120.0


class Group:
    """`size` ranks, until `close`."""

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.size, self.folder, self.number = size, folder, 0
        self.log = (folder / "log.txt").open("w+b")
        self.process = subprocess.Popen(
            [*TORCHRUN, str(size), "-m", "tests.m8_parallel.program", str(folder)],
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def begin(self, case: Any) -> Path:
        """Give all ranks a case; return where rank 0 writes the answer."""
        self.number += 1
        written = self.folder / "case.tmp"
        written.write_text(json.dumps(case), encoding="utf-8")
        written.rename(self.folder / f"case-{self.number}.json")
        return self.folder / f"answer-{self.number}.json"

    def ask(self, case: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a case."""
        answer, end = self.begin({"case": case, **arguments}), time.monotonic() + LIMIT_S
        while not answer.exists():
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
        return found

    def said(self) -> str:
        """The last lines that its processes have printed."""
        return (self.folder / "log.txt").read_text("utf-8", "replace")[-6000:]

    def close(self) -> None:
        """End all processes."""
        if self.process.poll() is None:
            self.begin(None)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()
