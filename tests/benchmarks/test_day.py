"""The count of what one's own cache finds on the recorded day."""

import json

from benchmarks.__main__ import main
from benchmarks.m4.day import conclusion, counted
from m4_radix_cache.mem_cache.radix_cache import RadixCache

MINE = """
from m4_radix_cache.mem_cache.radix_cache import RadixCache

class Mine(RadixCache):
    strategies = RadixCache.strategies | {"lru": lambda node: RANK}

PARTS = {"prefix_cache": Mine}
NOTHING = {}
"""


def run(tmp_path, rank, name="PARTS"):
    (tmp_path / "mine.py").write_text(MINE.replace("RANK", rank))
    parts = ["--parts", f"{tmp_path / 'mine.py'}:{name}"]
    return main(["day", *parts, "--requests", "240", "--output", str(tmp_path)])


def test_a_better_strategy_finds_more_and_the_default_one_finds_the_same(tmp_path, capsys):
    assert run(tmp_path, "node.last_access_time") == 0
    counts = json.loads((tmp_path / "day.json").read_text())
    assert counts["yours"] == counts["default"] == counted(RadixCache, 240)
    assert run(tmp_path, "(node.hit_count, node.last_access_time)") == 0
    counts = json.loads((tmp_path / "day.json").read_text())
    assert counts["yours"]["day"]["16384"] > counts["default"]["day"]["16384"] > 0.2
    assert counts["yours"]["day"]["524288"] == counts["default"]["day"]["524288"], "there is room for all"
    assert "finds more in 2 and less in 0" in " ".join(capsys.readouterr().out.split())


def test_the_conclusion_counts_pieces():
    own, default = {"pieces": [0.3, 0.2, 0.5]}, {"pieces": [0.2, 0.3, 0.5]}
    assert "more in 1 and less in 1; the difference is +0.0 points in the mean, from -10.0 to +10.0" in conclusion(
        own, default
    )


def test_parts_without_a_cache_are_refused(tmp_path, capsys):
    assert run(tmp_path, "0", "NOTHING") == 2
    assert "has no prefix_cache" in capsys.readouterr().err
