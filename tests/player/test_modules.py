"""The player's modules and its places in the code fit the events of all milestones; nothing here needs a browser."""

import re

import pytest

from stepwise_player.page import IMPORT, MODULES, STATIC
from stepwise_player.sources import PACKAGES, sources
from tests.events.milestones import MILESTONES, event_classes

KINDS = {cls.kind_name() for milestone in MILESTONES for cls in event_classes(milestone)}
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in STATIC.glob("*.js")}


def test_a_page_has_all_modules_each_after_those_that_it_imports() -> None:
    assert set(MODULES) == TEXTS.keys() - {"site"}
    for number, name in enumerate(MODULES):
        assert {match[2] for match in IMPORT.finditer(TEXTS[name])} <= set(MODULES[:number]), name


@pytest.mark.parametrize("name", ["requests", "state"])
def test_a_handler_is_that_of_an_event(name: str) -> None:
    handlers = TEXTS[name].partition("const HANDLERS = {")[2].partition("\n};")[0]
    names = set(re.findall(r"^  (\w+)(?:\(|:)", handlers, re.M))
    assert len(names) > 10 and names <= KINDS


@pytest.mark.parametrize("name", TEXTS)
def test_an_event_that_a_module_asks_for_exists(name: str) -> None:
    assert set(re.findall(r"\.event [!=]== \"(\w+)\"", TEXTS[name])) <= {*KINDS, "string"}


def test_every_event_leads_to_the_calls_that_emit_it_or_to_its_class() -> None:
    assert sources().keys() == KINDS
    for kind, places in sources().items():
        for place in places:
            line = (PACKAGES / place["where"]).read_text(encoding="utf-8").splitlines()[place["line"] - 1]
            assert "emit(" in line or line.startswith("class "), f"{kind}: {place['where']}:{place['line']}"
