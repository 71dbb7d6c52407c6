"""The player in a notebook: `Player("trace.jsonl")`, or two traces side by side. Needs `anywidget`."""

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from stepwise_player.page import STATIC, bundle, packed
from stepwise_player.sources import sources

RENDER = """
async function render({model, el}) {
  const root = document.createElement("div");
  el.append(root);
  try {
    const unpack = async ({name, packed}) => ({name, text: await unpacked(packed)});
    const runs = await Promise.all(model.get("runs").map(unpack));
    const player = mount(root, runs, {links: model.get("links")});
    return () => player.close();
  } catch (error) { fail(root, error); }
}
export default {render};
"""


class Player(anywidget.AnyWidget):
    """A widget that replays trace files; their names are its titles. Raises `OSError`."""

    _esm = bundle() + RENDER
    _css = (STATIC / "player.css").read_text(encoding="utf-8")
    runs: Any = traitlets.List().tag(sync=True)
    links: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, *traces: str | Path, **options: Any) -> None:
        runs = [packed(Path(trace).stem, Path(trace).read_bytes()) for trace in traces]
        super().__init__(runs=runs, links=sources(), **options)
