"""The page /status in a real browser, while a server works."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.m7_serving.servers import chat, serving
from tests.m7_serving.test_kills import eventually

PAINTED = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"


@pytest.mark.exhaustive
@pytest.mark.browser
def test_a_browser_shows_lanes(browser: Any) -> None:
    """Of a server while it works: a lane for each request, an aborted one, the numbers of the tiles, a lost server."""
    with serving("--max-num-seqs", "4") as server, OpenAI(base_url=server.url, api_key="none") as client:
        asked = chat(max_tokens=1000, extra_body={"ignore_eos": True})
        with browser.new_page() as page, ThreadPoolExecutor(12) as pool:
            page.goto(f"{server.root}/status")
            assert eventually(lambda: page.evaluate("find('state').textContent") == "")
            assert page.evaluate("canvas = find('lanes'); canvas.dataset.requests") == "0"
            answers = [pool.submit(lambda: client.chat.completions.create(**asked)) for _ in range(11)]
            stream = client.chat.completions.create(**asked, stream=True)
            next(iter(stream))
            stream.close()
            assert eventually(lambda: page.evaluate("find('tiles').firstChild.textContent") == "4running")
            assert eventually(lambda: page.evaluate("canvas.dataset.requests") == "12")  # lanes stay for 30 s
            for each in answers:
                assert each.result().usage.completion_tokens == 1000
            ended = "[...requests.values()].map(one => one.reason).sort().join()"
            assert eventually(lambda: page.evaluate(ended) == ",".join(["abort", *["length"] * 11]))
            assert page.evaluate("[...requests.values()].every(one => one.prompt > 0 && one.engine === 'both-0')")
            assert page.evaluate(PAINTED)
            assert eventually(lambda: page.evaluate("find('tiles').firstChild.textContent") == "0running")
            server.stop()
            assert eventually(lambda: "does not answer" in page.evaluate("find('state').textContent"))
