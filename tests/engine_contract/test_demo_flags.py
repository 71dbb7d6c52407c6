"""The flags of the demos of all milestones: each has a help, and a wrong one is one clear line."""

import base64
import gzip
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m6_multimodal_pd.demo_tour import PICTURES
from tests.events.milestones import MILESTONES
from tests.support.demos import words
from tests.support.traces import chrome_bars, chrome_entries

PICTURE = PICTURES / "a_big_red_circle.png"
HELP = [
    (
        "m1",
        """prompt chat trace trace-file chrome-trace player model device dtype max-model-len threads max-tokens
        temperature top-k top-p min-p presence-penalty frequency-penalty repetition-penalty stop seed""",
        "four requests on the checkpoint that ships",
    ),
    ("m2", "max-num-seqs max-num-batched-tokens num-prompts", "Number of requests in the comparison. Default: 24."),
    (
        "m3",
        "n load-format attention-backend kv-cache-memory-bytes gpu-memory-utilization",
        "Exact number of blocks",
    ),
    (
        "m4",
        """cache eviction-policy cache-salt priority schedule-policy schedule-conservativeness
        priority-preemption preemption-threshold page-size max-total-tokens host-memory write-policy disk disk-bytes
        prefetch-policy""",
        "Number of users in part 1 of the tour. Default: 5.",
    ),
    (
        "m5",
        """schedule no-chunked-prefill chunked-prefill-size target-gap-ms speculative num-speculative-tokens
        draft-model""",
        "Number of streams in part 1 of the tour. Default: 4.",
    ),
    ("m5", "", "128 on a CPU"),
    (
        "m6",
        """image video video-fps allow-url min-pixels max-pixels encoder-budget embedding-cache-bytes pd prefill decode
        transport""",
        "Number of requests without a picture",
    ),
]
"""Milestones, the flags that each adds, and a text of its help."""


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The demo's number of threads stays in its test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def demo_of(milestone: str) -> Any:
    """The demo of `m3`, for example."""
    return importlib.import_module(f"{next(name for name in MILESTONES if name.startswith(milestone))}.demo")


@pytest.mark.parametrize("number", range(len(HELP)), ids=[milestone for milestone, _, _ in HELP])
def test_every_flag_of_a_milestone_and_of_those_before_it_has_a_help(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    milestone, _, text = HELP[number]
    with pytest.raises(SystemExit) as caught:
        demo_of(milestone).main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and f"usage: python -m {milestone}" in out and text in words(out)
    flags = [flag for _, added, _ in HELP[: number + 1] for flag in added.split()]
    assert [flag for flag in flags if not re.search(rf"^  .*--{flag}[ ,\n]", out, re.M)] == []


@pytest.mark.parametrize(
    ("milestone", "flags"),
    [
        *(("m1", flags) for flags in ("--nonsense", "--max-tokens many", "--trace loud", "--prompt a --chat", "stray")),
        ("m3", "--execution padded"),
        *(("m4", flags) for flags in ("--preemption swap", "--num-blocks 9", "--schedule-policy foo", "--cache tree")),
        *(("m4", f"--host-memory {size}") for size in ("64MB", "1.5GiB", "MiB", "much")),
    ],
)
def test_a_flag_or_choice_that_does_not_exist_is_refused_with_the_usage(
    milestone: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo_of(milestone).main(flags.split())
    err = capsys.readouterr().err
    assert caught.value.code == 2 and "usage:" in err and flags.split()[0] in err


@pytest.mark.parametrize("milestone", ["m2", "m3"])
def test_a_prompt_is_answered_as_in_m1(milestone: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "What is a KV cache?", *"--trace off --max-tokens 9 --temperature 1 --seed 4".split()]
    answers = [(demo_of(each).main(flags), capsys.readouterr()) for each in ("m1", milestone)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("milestone", ["m1", "m2", "m3", "m4", "m5", "m6"])
def test_every_demo_writes_a_trace_for_perfetto_and_a_page(milestone: str, tmp_path: Path) -> None:
    path, page = tmp_path / "trace.json", tmp_path / "run.html"
    files = ["--chrome-trace", str(path), "--player", str(page)]
    flags = ["--prompt", "What is prefill?", *"--trace off --max-tokens 3".split(), *files]
    assert demo_of(milestone).main(flags) == 0
    packed = re.findall(r'"packed": "([^"]+)"', page.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in gzip.decompress(base64.b64decode(*packed)).decode().splitlines()]
    assert [line["sentence"] for line in lines if line["event"] == "finish"] == [
        "req-0 ends after 3 output tokens (length): max_tokens = 3 is reached."
    ]
    assert {"request_added", "finish"} <= {entry["name"] for entry in chrome_entries(path)}
    assert [label for _, _, label in chrome_bars(path)] == ["prefill", "decode", "decode"]


WRONG = [
    ("m1", "--max-tokens 0", "max_tokens=0"),
    ("m1", "--device toaster", "device='toaster'"),
    ("m1", "--device cuda:128", "device='cuda:128' is not supported"),
    ("m1", "--prompt a --max-model-len 9000", "9000"),
    ("m1", "--stop ", "stop="),
    ("m1 m2 m3 m4", "--trace-file /nowhere/at/all/trace.jsonl", "/nowhere/at/all/trace.jsonl"),
    ("m1 m4", "--player /nowhere/at/all/run.html", "/nowhere/at/all/run.html"),
    ("m1 m4", "--chrome-trace /nowhere/at/all/trace.json", "/nowhere/at/all/trace.json"),
    ("m1 m4 m6", "--model /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("m2 m3 m4 m6", "--num-prompts 0", "num_prompts=0"),
    ("m2 m3 m4 m5 m6", "--max-num-batched-tokens 2", "max_num_batched_tokens=2 is less than max_num_seqs="),
    ("m2", "--max-num-seqs 100000000", "max_num_seqs of at most"),
    ("m3 m4 m6", "--chat --n 2", "n=2"),
    ("m1 m3", "--threads 0", "threads=0"),
    ("m3", "--num-blocks 9 --kv-cache-memory-bytes 9", "give one of them"),
    ("m3", "--num-blocks 1", "the whole KV memory has 1"),
    ("m4", "--prompt a --kv-cache-memory-bytes 100000", "1,024 tokens, the least that is chosen without max_model_len"),
    ("m4", "--max-total-tokens 8", "max_total_tokens=8"),
    ("m4", "--cache hash --eviction-policy lfu", "eviction_policy='lfu'"),
    ("m4", "--prompt a --cache-salt=", "cache_salt=''"),
    ("m4 m6", "--disk somewhere", "disk_path='somewhere' has no effect without host_memory_bytes"),
    ("m4", "--host-memory 1KiB", "host_memory_bytes=1024 is less than a page of KV, 64.0 KiB"),
    ("m4 m6", "--priority-preemption", "priority_preemption=True has no effect with schedule_policy='lpm'"),
    ("m4 m5", "--prompt a --priority 99999999999999999999", "priority=99999999999999999999"),
    ("m5", "--prompt x --draft-model somewhere", "has no effect with method=None"),
    ("m5", "--schedule prefill_first --target-gap-ms 3", "target_gap_ms has no effect"),
    ("m5", "--prompt x --speculative draft_model --draft-model /nowhere", "nowhere"),
    ("m6", f"--model {TEXT_MODEL} --image {PICTURE}", "takes texts only"),
    ("m6", "--trace off --image /nowhere/at/all.gif", "No such file"),
    ("m6", "--prompt x --video-fps 2", "video_fps=2.0 has no effect"),
    ("m6", "--min-pixels 9 --max-pixels 3", "min_pixels=9"),
    ("m6", "--allow-url gopher", "'gopher' is not one of file, http, https"),
    ("m6", "--decode 65", "decode=65 is not valid: Expected `int` <= 64"),
]
"""Milestones, flags of their demos, and what the error names."""


@pytest.mark.parametrize(
    ("milestone", "flags", "named"),
    [(milestone, flags, named) for milestones, flags, named in WRONG for milestone in milestones.split()],
    ids=lambda value: value[:50],
)
def test_a_wrong_value_is_one_clear_line(
    milestone: str, flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo_of(milestone).main(flags.split(" ")) == 2
    out, err = capsys.readouterr()
    assert named in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert out == "" or not err.startswith("ConfigError"), "it is found before the tour begins"
