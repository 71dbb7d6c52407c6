"""Configuration of images and videos: limits, budgets of their encoder, and the processes that read them.

The limits are checked before an image is decoded, because images may come from untrusted users. The encoder has two:
the tokens that a step encodes, and the memory for embeddings. This file imports no torch, as all files that a process
needs to read an image (`media_process.py`). vLLM: `MultiModalConfig`, `EncoderCacheManager`'s budgets; SGLang:
`--mm-...` of `ServerArgs`, `SGLANG_VLM_CACHE_SIZE_MB`, `SGLANG_IO_WORKERS`.
"""

import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import PositiveInt, check_fields

URL_SCHEMES = ("file", "http", "https")
ENCODER_BUDGETS = {"cpu": 1024, "cuda": 16384}
"""By the kind of device: maximum number of image tokens encoded per step."""
Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
HOST = re.compile(r"[0-9A-Za-z._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
NumProcesses = Annotated[int, Meta(ge=0, le=64)]


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig:
    """Limits for images and videos and for their encoder, and the processes that read them."""

    allowed_url_schemes: tuple[str, ...] = ()
    """Schemes of URLs that are read: `file`, `http`, `https`. None of them by default: a URL makes the engine read what
    its sender cannot reach. `data:` URLs contain their image and are always accepted."""
    allowed_url_hosts: tuple[str, ...] | None = None
    """Hosts that `http` and `https` URLs may name, also after a redirect; they are reached without a proxy, and only at
    public addresses. None: all hosts, at all addresses."""
    url_timeout_s: Seconds = 10.0
    """Timeout of a URL in seconds, up to its last byte and including all redirects."""
    max_items: PositiveInt = 16
    """Maximum number of images and videos in one request."""
    max_file_bytes: PositiveInt = 32 * 2**20
    """Maximum size of an encoded image or animation."""
    max_image_pixels: PositiveInt = 2**25
    """Maximum width times height, compared with the file's header before a pixel is decoded. PIL rejects files of more
    than twice `PIL.Image.MAX_IMAGE_PIXELS` with any value of this field."""
    max_video_frames: PositiveInt = 4096
    """Maximum number of frames of a video before sampling."""
    max_video_pixels: PositiveInt = 2**28
    """Maximum width times height of all sampled frames together. Of an animation all frames count, because each is
    drawn over the one before."""
    min_pixels: PositiveInt | None = None
    """Minimum number of pixels of an image after resizing. None: that of the model's processor."""
    max_pixels: PositiveInt | None = None
    """Maximum number of pixels of an image after resizing. None: that of the model's processor."""
    encoder_budget: PositiveInt | None = None
    """Maximum number of image tokens encoded per step, for all requests together; a larger item is the only one that is
    encoded in its step. None: 1,024 on a CPU, 16,384 on CUDA."""
    embedding_cache_bytes: PositiveInt = 128 * 2**20
    """Memory for embeddings, which are kept for later requests until others need it. Unlike KV they are shared across
    `cache_salt`s: the time to a first token may show that another request had the same image."""
    num_media_processes: NumProcesses = 0
    """Processes that fetch, decode and resize images, so that no step of other requests waits for that. They start with
    the first image. A request then waits in front of the queue until its images are read, and one whose image cannot be
    used ends with `finish_reason="error"`. 0: the call that adds a request reads its images, and raises the error."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_schemes(self.allowed_url_schemes)
        check_hosts(self.allowed_url_hosts)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")

    def budget(self, device_type: str) -> int:
        """Return the maximum number of image tokens encoded per step on a device of this type."""
        return self.encoder_budget or ENCODER_BUDGETS.get(device_type, ENCODER_BUDGETS["cpu"])


def check_hosts(hosts: Any) -> None:
    """Raise `ConfigError` unless these are names of hosts, without ports, or None."""
    if hosts is None:
        return
    is_list = isinstance(hosts, tuple | list)
    if not is_list or not all(isinstance(host, str) and HOST.fullmatch(host) for host in hosts):
        raise ConfigError(f"allowed_url_hosts={shown(hosts)} must be a tuple of names, such as ('images.example.org',)")


def check_schemes(schemes: object) -> None:
    """Raise `ConfigError` unless these are names of schemes that can be allowed."""
    if not isinstance(schemes, tuple | list | frozenset | set):
        raise ConfigError(f"allowed_url_schemes={shown(schemes)} must be a tuple of names, such as ('https',)")
    for scheme in schemes:
        if not isinstance(scheme, str) or scheme not in URL_SCHEMES:
            raise ConfigError(f"allowed_url_schemes: {shown(scheme)} is not one of {', '.join(URL_SCHEMES)}")
