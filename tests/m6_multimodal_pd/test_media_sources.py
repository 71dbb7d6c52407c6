"""A URL makes the engine read what its sender cannot reach: it is followed only where that was allowed by name."""

import base64
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from time import sleep
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from m6_multimodal_pd import ConfigError, InvalidMediaError, MultimodalConfig
from m6_multimodal_pd.multimodal import fetch_address
from m6_multimodal_pd.multimodal.decode_image import Picture
from tests.m6_multimodal_pd import media_files
from tests.m6_multimodal_pd.media_files import encoded, read

PIXELS = np.random.default_rng(5).integers(0, 256, (6, 4, 3), dtype=np.uint8)
PNG = encoded(PIXELS)


def load(url: str, key: str = "image_url", **config: Any) -> np.ndarray:
    media = read({"type": key, key: url}, **config)
    assert isinstance(media, Picture)
    return media.pixels


def refused(url: str, key: str = "image_url", **config: Any) -> str:
    return media_files.refused({"type": key, key: url}, **config)


class Site(BaseHTTPRequestHandler):
    """Serves a picture, redirects, endless bytes, and says what was asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        way, _, argument = self.path[1:].partition("?")
        if way in ("to", "flood", "circle"):
            self.send_response(302)
            self.send_header("Location", argument or self.path)
            self.end_headers()
            self.pour(1000 if way == "flood" else 0)
        elif way == "drops":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drops: ")
            self.pour(1000, b"drop", pause=0.02)
        elif way == "garbled":
            self.wfile.write(b"HTTP/1.1 abc OK\r\n\r\n")
        elif way == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(PNG) + 7))
            self.end_headers()
            self.wfile.write(PNG)
        elif way == "missing":
            self.send_error(404)
        else:
            self.send_response(200)
            if way == "claims":
                self.send_header("Content-Length", str(10**12))
            self.end_headers()
            self.pour(1000 if way == "endless" else 1, PNG if way == "picture" else bytes(65536))

    def do_CONNECT(self) -> None:
        """As a proxy: it never ends its headers."""
        self.asked.append(self.path)
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drops: ")
        self.pour(1000, b"drop", pause=0.02)

    def pour(self, times: int, content: bytes = bytes(65536), pause: float = 0.0) -> None:
        """Send the same again and again."""
        try:
            for _ in range(times):
                self.wfile.write(content)
                sleep(pause)
        except OSError:  # the other side has had enough
            self.asked.append("hung up")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Site.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# --- which schemes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["image", "image_url"])
@pytest.mark.parametrize("scheme", ["http", "https", "file", "HTTP", "File"])
def test_urls_are_refused_unless_their_scheme_is_allowed(scheme: str, key: str) -> None:
    """And the error names the setting that allows it."""
    others = tuple({"http", "https", "file"} - {scheme.lower()})
    for allowed in ((), others):
        says = refused(f"{scheme}://localhost/cat.png", key, allowed_url_schemes=allowed)
        assert f"allowed_url_schemes=('{scheme.lower()}',)" in says


OTHER_SCHEMES = ["ftp://host/cat.png", "javascript:alert(1)", "gopher://host", "s3://bucket/cat.png"]
PATHS = ["cat.png", "/tmp/cat.png", "C:\\cat.png", "", " http://host/cat.png", "~/cat.png"]


@pytest.mark.parametrize(
    ("key", "url"),
    [*((key, url) for key in ("image", "image_url") for url in OTHER_SCHEMES), *(("image_url", p) for p in PATHS)],
)
def test_other_schemes_are_never_followed_and_a_path_is_no_url(key: str, url: str) -> None:
    assert "not an accepted URL" in refused(url, key, allowed_url_schemes=("http", "https", "file"))


def test_a_video_by_url_is_refused_in_the_same_way() -> None:
    for url in ("http://host/clip.gif", "/tmp/clip.gif"):
        assert refused(url, "video_url")
    assert "allowed_url_schemes" in refused("http://host/clip.gif", "video")


@pytest.mark.parametrize(
    "path", ["C:\\a\\b.png", "c:/a.png", "c://a.png", "shot 12:30.png", "shot:1.png", "./http://x"]
)
def test_a_path_with_a_colon_is_still_a_path(path: str) -> None:
    assert "No such file" in refused(path, "image")


# --- data: ------------------------------------------------------------------------------------------------------------


def test_the_content_and_not_its_claimed_type_decides() -> None:
    content = base64.b64encode(PNG).decode()
    for head in ("data:image/png;base64", "DATA:;BASE64", "data:text/html;charset=utf-8;base64"):
        np.testing.assert_array_equal(load(f"{head},{content}"), PIXELS)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png",
        "data:image/png;base64,",
        "data:image/png;base64,A===",
        "data:image/png;base64,ä",
    ],
)
def test_a_broken_data_url_is_refused(url: str) -> None:
    assert refused(url).startswith("image: ")
    assert refused(url, "image").startswith("image: ")


def test_base64_with_other_characters_in_it_is_refused() -> None:
    content = base64.b64encode(PNG).decode()
    assert "base64" in refused(f"data:image/png;base64,{content[:40]}!{content[40:]}")


def test_an_error_does_not_repeat_a_whole_data_url() -> None:
    assert len(refused("data:image/png;base64," + "!" * 10_000)) < 300


# --- file: ------------------------------------------------------------------------------------------------------------


def test_a_file_url_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a cat.png"
    path.write_bytes(PNG)
    for url in (path.as_uri(), path.as_uri().replace("file://", "file://localhost")):
        np.testing.assert_array_equal(load(url, allowed_url_schemes=("file",)), PIXELS)


@pytest.mark.parametrize("url", ["file://other/x.png", "file:///x.png?y", "file:///x.png#y"])
def test_a_file_url_names_a_path_of_this_machine_and_nothing_else(url: str) -> None:
    assert "file:///path" in refused(url, allowed_url_schemes=("file",))


# --- http: ------------------------------------------------------------------------------------------------------------


def test_a_picture_is_fetched_where_that_is_allowed(site: str) -> None:
    np.testing.assert_array_equal(load(f"{site}/picture", allowed_url_schemes=("http",)), PIXELS)
    np.testing.assert_array_equal(load(f"{site}/to?/picture", allowed_url_schemes=("http",)), PIXELS)


@pytest.mark.parametrize("target", ["file:///{secret}", "ftp://127.0.0.1/x", "data:image/png;base64,AAAA"])
def test_no_redirect_leads_out_of_the_web(site: str, tmp_path: Path, target: str) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG)
    target = target.format(secret=str(secret)[1:])
    assert "cannot be read" in refused(f"{site}/to?{target}", allowed_url_schemes=("http", "https", "file"))
    assert len(Site.asked) == 1


def test_a_redirect_leads_only_to_a_scheme_that_is_allowed(site: str) -> None:
    says = refused(f"{site}/to?https://127.0.0.1:1/x", allowed_url_schemes=("http",))
    assert "leads to 'https://127.0.0.1:1/x': https: URLs are refused" in says


def test_only_named_hosts_are_reached_also_by_a_redirect(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_address, "is_public", lambda address: True)
    named: dict[str, Any] = {"allowed_url_schemes": ("http",), "allowed_url_hosts": ("127.0.0.1",)}
    assert np.array_equal(load(f"{site}/picture", **named), PIXELS)
    assert "not one of allowed_url_hosts" in refused(site.replace("127.0.0.1", "localhost") + "/picture", **named)
    assert "not one of allowed_url_hosts" in refused(f"{site}/to?http://localhost:1/x", **named)
    assert "not one of allowed_url_hosts" in refused("http://user@127.0.0.1@other/x", **named)
    assert "not one of allowed_url_hosts" in refused(f"{site}/picture", **named | {"allowed_url_hosts": ()})


def test_a_named_host_is_reached_at_a_public_address_only(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would be reached, and could reach everything."""
    monkeypatch.setenv("http_proxy", site)
    for host in ("127.0.0.1", "localhost"):
        says = refused(
            site.replace("127.0.0.1", host) + "/picture", allowed_url_schemes=("http",), allowed_url_hosts=(host,)
        )
        assert f"{host} has no public address" in says
    assert not Site.asked


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1")),
        *((address, False) for address in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1")),
        *((address, False) for address in ("64:ff9b::a00:1", "2002:a00:1::1", "2001:db8::1")),
    ],
)
def test_an_address_is_public_or_not(address: str, expected: bool) -> None:
    assert fetch_address.is_public(address) is expected


@pytest.mark.parametrize("hosts", ["example.org", ("a b",), ("http://a",), (1,), ("example.org:80",)])
def test_hosts_are_names(hosts: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_url_hosts"):
        MultimodalConfig(allowed_url_hosts=hosts)


def test_no_more_than_the_limit_is_read(site: str) -> None:
    assert "max_file_bytes=1,000 " in refused(f"{site}/endless", allowed_url_schemes=("http",), max_file_bytes=1000)
    load(f"{site}/picture", allowed_url_schemes=("http",))  # one after the other: now the first is over
    assert Site.asked == ["/endless", "hung up", "/picture"]
    says = refused(f"{site}/claims", allowed_url_schemes=("http",))
    assert "it has 1,000,000,000,000 bytes" in says


def test_bytes_that_come_drop_by_drop_are_not_waited_for(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is of the whole answer, not of each of its pieces."""
    clock = SimpleNamespace(monotonic=count(step=6).__next__)
    monkeypatch.setattr("m6_multimodal_pd.multimodal.fetch_deadline.time", clock)
    assert "url_timeout_s=20" in refused(f"{site}/endless", allowed_url_schemes=("http",), url_timeout_s=20)


def test_headers_that_come_drop_by_drop_are_not_waited_for(site: str) -> None:
    assert "url_timeout_s=0.1" in refused(f"{site}/drops", allowed_url_schemes=("http",), url_timeout_s=0.1)
    load(f"{site}/picture", allowed_url_schemes=("http",))  # one after the other: now the first is over
    assert Site.asked == ["/drops", "hung up", "/picture"]


def test_the_deadline_is_that_of_a_proxys_answer_too(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection ends with it, although the caller keeps the error."""
    monkeypatch.setenv("https_proxy", site)
    with pytest.raises(InvalidMediaError, match=r"url_timeout_s=0\.1") as kept:
        load("https://host/x", allowed_url_schemes=("https",), url_timeout_s=0.1)
    load(f"{site}/picture", allowed_url_schemes=("http",))  # one after the other: now the first is over
    assert Site.asked == ["host:443", "hung up", "/picture"]
    assert kept.value.__cause__ is not None, "with all that it refers to"


def test_what_comes_with_a_redirect_is_not_read(site: str) -> None:
    load(f"{site}/flood?/picture", allowed_url_schemes=("http",))
    assert Site.asked == ["/flood?/picture", "hung up", "/picture"]


def test_an_answer_that_ends_before_its_length_is_refused(site: str) -> None:
    """A clip would only be shorter, and nobody would know."""
    assert "its last 7 bytes are missing" in refused(f"{site}/cut", allowed_url_schemes=("http",))


def test_no_timeout_is_too_long_for_a_socket(site: str) -> None:
    load(f"{site}/picture", allowed_url_schemes=("http",), url_timeout_s=1e300)


def test_an_error_of_the_web_is_one_line(site: str) -> None:
    assert "\n" not in refused(f"{site}/garbled", allowed_url_schemes=("http",))


def test_an_answer_that_is_no_picture_is_refused(site: str) -> None:
    assert "404" in refused(f"{site}/missing", allowed_url_schemes=("http",))
    assert "none of PNG" in refused(f"{site}/zeros", allowed_url_schemes=("http",))


@pytest.mark.parametrize(
    "url", ["http://", "http://127.0.0.1:1/x", "http://127.0.0.1:x/", "http://[::", "http://a b/c"]
)
def test_a_url_that_leads_nowhere_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert refused(url, allowed_url_schemes=("http",)).startswith("image: ")


def test_a_site_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        assert "timed out" in refused(url, allowed_url_schemes=("http",), url_timeout_s=0.05)
