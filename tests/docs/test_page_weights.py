"""The check of a built site counts what a page loads itself, and knows which pages have a limit."""

from pathlib import Path

import pytest

from tests.docs.page_weights import Weight, table, weigh


def written(folder: Path, files: dict[str, str]) -> Path:
    """A site with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_page_weighs_its_html_its_pictures_once_and_its_own_scripts(tmp_path: Path) -> None:
    page = (
        '<img src="../assets/a.svg#only-light"><img src="../assets/a.svg#only-dark">'
        '<img src="data:image/png;base64,AA">'
        '<script src="../assets/player.js"></script><script src="../assets/javascripts/theme.js"></script>'
        '<script src="../assets/vendor/mermaid.js"></script><script>1</script>'
    )
    sizes = {"a.svg": 700, "player.js": 30, "javascripts/theme.js": 9, "vendor/mermaid.js": 9}
    site = written(tmp_path, {"m1_x/index.html": page} | {f"assets/{name}": "é" * n for name, n in sizes.items()})
    assert weigh(site, site / "m1_x/index.html") == Weight("m1_x/index.html", len(page), 1400, 60)


@pytest.mark.parametrize(
    ("page", "limit"),
    [
        ("index.html", 500),
        ("m3_paged_attention/index.html", 500),
        ("m3_paged_attention_2/index.html", 500),
        ("api/parts_m6/index.html", 600),
        ("notebooks/m6_pd/index.html", 1000),
        ("code/m1_single_request/scheduler/index.html", None),
        ("glossary/index.html", None),
    ],
)
def test_lessons_reference_and_notebooks_have_a_limit(page: str, limit: int | None) -> None:
    assert Weight(page, 0, 0, 0).limit == limit
    if limit:
        assert not Weight(page, 1000 * limit, 0, 0).is_too_much
        assert Weight(page, 1000 * limit - 1, 1, 1).is_too_much


def test_the_table_names_what_is_too_heavy() -> None:
    weights = [Weight("index.html", 400_000, 0, 0), Weight("m1_x/index.html", 400_000, 100_000, 1)]
    _, heavy, light = table(weights).split("\n")
    assert "TOO MUCH" in heavy and "TOO MUCH" not in light
