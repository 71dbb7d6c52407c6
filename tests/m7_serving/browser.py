"""A real browser without a screen, driven by the DevTools protocol."""

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-port=0 --window-size=1100,1000"""


class Page:
    """An open page."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, count(1)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := json.loads(self._connection.recv(timeout=30))).get("id") != number:
            pass
        return message["result"]

    def value(self, expression: str) -> Any:
        """Evaluate an expression of JavaScript in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def opened(url: str, folder: Path) -> Iterator[Page]:
    """Open a page in a browser whose profile is in this folder."""
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={folder}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as browser:
        try:
            assert browser.stderr is not None
            line = next(line for line in browser.stderr if line.startswith("DevTools listening on "))
            root = line.split("//")[1].partition("/")[0]
            asked = urllib.request.Request(f"http://{root}/json/new?{url}", method="PUT")
            with urllib.request.urlopen(asked) as answer:
                address = json.load(answer)["webSocketDebuggerUrl"]
            with connect(address, max_size=None) as connection:
                yield Page(connection)
        finally:
            browser.terminate()
