"""A site that sends a picture once it is told to: so a test decides when an image has been read, without a clock."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread

PATIENCE_S = 60.0


class GatedSite:
    """Pictures by name; each reader waits until `release`."""

    def __init__(self, pictures: dict[str, bytes]) -> None:
        self.pictures, self.address = pictures, ""
        self.asked: Counter[str] = Counter()
        """How often a picture was asked for."""
        self.most_at_once = 0
        """The largest number of readers that waited at once."""
        self._num_waiting = 0
        self._open: set[str] = set()
        self._changed = Condition()

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"

    def part(self, name: str) -> dict[str, str]:
        """The part of a message with this picture."""
        return {"type": "image_url", "image_url": self.url(name)}

    def release(self, *names: str) -> None:
        """Send these pictures to everybody who asks for them."""
        with self._changed:
            self._open.update(names)
            self._changed.notify_all()

    def await_asked(self, name: str, times: int = 1) -> None:
        """Wait until a process reads this picture."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked[name] >= times, PATIENCE_S), f"{name} is not read"

    def wait(self, name: str) -> bytes:
        """What a reader gets, when it gets it."""
        with self._changed:
            self.asked[name] += 1
            self._num_waiting += 1
            self.most_at_once = max(self.most_at_once, self._num_waiting)
            self._changed.notify_all()
            self._changed.wait_for(lambda: name in self._open, PATIENCE_S)
            self._num_waiting -= 1
        return self.pictures[name]


@contextmanager
def gated_site(pictures: dict[str, bytes]) -> Iterator[GatedSite]:
    """Serve pictures on the loopback interface; at the end all of them are released."""
    site = GatedSite(pictures)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = site.wait(self.path[1:])
            try:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the reader was killed
                pass

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield site
        finally:
            site.release(*pictures)
            server.shutdown()
            thread.join()
