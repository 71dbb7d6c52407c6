"""A trace as a page: one HTML file that replays it, without a server and without a network.

    Path("run.html").write_text(page([("my run", Path("trace.jsonl").read_bytes())]), encoding="utf-8")

`static/` has the JavaScript: `requests.js` and `state.js` handle events, `trace.js` finds steps, `panel.js` shows one
run, with a file for each view, and `player.js` one or two runs with their controls. The package handles the events
of all milestones by their names, and so it belongs to none of them.
"""

from stepwise_player.page import bundle, page

__all__ = ["bundle", "page"]
