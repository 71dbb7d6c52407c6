"""The benchmark of the tiers: what it counts is exact, and all of it runs at its quick size."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.m3 import on_model
from benchmarks.m4_tiers.break_even import least_from
from benchmarks.m4_tiers.capacity import shares
from benchmarks.m4_tiers.chat import ALL, NONE, TIERS, chat
from m4_radix_cache.mem_cache.radix_key import RadixKey

pytestmark = pytest.mark.exhaustive  # whole runs of a benchmark


def test_a_device_that_is_too_small_finds_in_host_memory_what_a_large_one_finds_itself():
    part = on_model(lambda engines: chat(engines, 16, 2, 1, 16))
    sides = part["sides"]
    assert [side["same_answers"] for side in sides.values()] == [32, 32, 32]
    assert sides[TIERS]["computed"] == sides[ALL]["computed"] < sides[NONE]["computed"] == 32 * 64 + 16 * 80
    assert sides[TIERS]["of_host"] == sides[TIERS]["found"] == sides[ALL]["found"] == 16 * 64
    assert (sides[ALL]["of_host"], sides[NONE]["found"]) == (0, 0)


def test_each_tier_finds_what_the_smaller_ones_have_lost():
    def requests(number):
        return [(RadixKey([1000 * n + i for i in range(640)]), 600) for n in range(number)]

    again = [*requests(60), *requests(60)]  # 38,400 tokens: more than the device and than the small host memory
    whole, asked = 592 * 60, 600 * 120
    assert shares(again, 0, 0)["all"] == 0
    assert shares(again, 2**15, 0)["all"] == 0
    large = shares(again, 2**16, 0)
    assert (large["on_device"], large["on_host"]) == (0, whole / asked)
    disk = shares(again, 2**15, 2**17)
    assert (disk["on_host"], disk["on_disk"], disk["all"]) == (0, whole / asked, whole / asked)


def test_a_tier_is_faster_from_the_length_on_from_which_no_longer_one_is_slower():
    assert least_from([(1, 0.9), (2, 1.1), (4, 0.8), (8, 1.2), (16, 1.5)]) == 8
    assert least_from([(1, 1.1), (2, 1.2)]) == 1
    assert least_from([(1, 1.1), (2, 0.9)]) is None


@pytest.mark.exhaustive
def test_every_part_runs_at_its_quick_size(tmp_path, capsys):
    assert main(["m4_tiers", "--quick", "--rounds", "2", "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "quick" / "m4_tiers.json").read_text("utf-8"))["parts"]
    for name in ("chat_embedded", "chat_0_6b"):
        assert all(side["same_answers"] == 32 for side in parts[name]["sides"].values())
    for name in ("restart_embedded", "restart_0_6b"):
        sides = parts[name]["sides"]
        assert [side["of_disk"] for side in sides.values()] == [0, 496, 496]
        assert all(side["same_answers"] == parts[name]["rounds"] for side in sides.values())
    assert all(row["gb_s"]["load"] > 0 for row in parts["copies"]["rows"])
    printed = capsys.readouterr().out
    assert all(f"[start:{name}]" in printed for name in parts)
