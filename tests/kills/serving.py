"""Kill and stop the engine of a server under load, and the server itself: `python -m tests.kills.serving`.

Four clients have streams all the time. After each blow they must end with an error within a limit, or go on; the server
must answer again, with the same text as before, within a minute. A server has a few blows, because each restart of its
engine waits longer than the one before; its last one is the server's own. The limits are in `LIMITS_S`.
"""

import argparse
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import openai
from openai import OpenAI
from rich.console import Console

from benchmarks import OUTPUT, RESULTS
from benchmarks.engines import SEEING_MODEL
from benchmarks.machine import environment
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_abandoned
from tests.m7_serving.servers import Server, chat
from tests.m7_serving.test_kills import eventually, is_gone, status_of_health

LIMITS_S = {"engine killed": 5.0, "engine stopped": 20.0, "front killed": 5.0}
"""Until the streams end with an error. A stopped engine is found by its heartbeat, of 15 s."""
OF_THE_ENGINE, OF_THE_FRONT = ("engine killed", "engine stopped"), ("front killed", "front stopped")
SERVES_AGAIN_S, LEFT_S = 60.0, 5.0
NUM_CLIENTS, BLOWS = 4, 5
ASKED = chat(max_tokens=24)
SEED = 1


class Clients:
    """Clients with streams without an end; `errors` has the times at which they ended."""

    def __init__(self, url: str) -> None:
        self.url, self.errors, self.others = url, [], []
        self.threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        self.started = threading.Semaphore(0)
        for thread in self.threads:
            thread.start()
        for _ in self.threads:
            assert self.started.acquire(timeout=30)

    def _run(self) -> None:
        asked = chat(extra_body={"ignore_eos": True}, max_tokens=None)  # as many as fit
        with OpenAI(base_url=self.url, api_key="none", max_retries=0) as client:
            try:
                for number, _ in enumerate(client.chat.completions.create(**asked, stream=True)):
                    if number == 2:
                        self.started.release()
            except (openai.APIError, OSError) as error:
                self.errors.append(time.monotonic())
                self.others += [] if "engine" in str(error) or "onnection" in str(error) else [str(error)]
            except Exception as error:  # a connection that is cut in a chunk is an error of httpx
                self.errors.append(time.monotonic())
                self.others += [] if "peer closed" in str(error) else [repr(error)]

    def ended_after(self, began: float) -> float:
        for thread in self.threads:
            thread.join(LIMITS_S["engine stopped"] + 10)
        return max(self.errors, default=began) - began if len(self.errors) == NUM_CLIENTS else float("inf")


def text_of(server: Server) -> str:
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        return str(client.chat.completions.create(**ASKED).choices[0].message.content)


def blow(server: Server, kind: str, wanted: str) -> dict[str, float]:
    """Kill or stop the engine while clients read; return the seconds until their errors and its next answer."""
    (engine,), clients = server.engines(), Clients(server.url)
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL if kind == "engine killed" else signal.SIGSTOP)
    found = {"error": clients.ended_after(began)}
    assert not clients.others, clients.others
    assert found["error"] <= LIMITS_S[kind], found
    assert eventually(lambda: status_of_health(server) == 200, SERVES_AGAIN_S), "it does not serve again"
    found["serves"] = time.monotonic() - began
    assert text_of(server) == wanted and is_gone(engine) and server.is_idle()
    return found


def end(server: Server, kind: str) -> dict[str, float]:
    """Kill the server, or stop it for a while; return the seconds that it took."""
    engines, clients, began = server.engines(), Clients(server.url), time.monotonic()
    if kind == "front killed":
        server.process.kill()
        found = {"error": clients.ended_after(began)}
        assert found["error"] <= LIMITS_S[kind] and not clients.others, (found, clients.others)
        assert eventually(lambda: all(map(is_gone, engines)), LEFT_S), "a child is left"
        assert not remove_abandoned(), "shared memory is left"
        return found | {"left": time.monotonic() - began}
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    server.process.send_signal(signal.SIGCONT)
    assert text_of(server), "it goes on"
    assert not clients.errors and not clients.others, "no stream ends by the stop"
    found = {"serves": time.monotonic() - began}
    status, log = server.stop()
    assert status == 0 and "Traceback" not in log, log
    clients.ended_after(began)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the results, and print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills.serving", description=__doc__)
    parser.add_argument("--number", type=int, default=50, help="blows in all")
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    args = parser.parse_args(argv)
    folder = RESULTS if args.record else OUTPUT
    folder.mkdir(exist_ok=True)
    path, env = folder / "kills_serving.json", environment(model=SEEING_MODEL, seed=SEED)
    random, number = Random(SEED), 0
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    while number < args.number:
        server = Server("--max-restarts", "1000", "--shutdown-timeout", "1")
        try:
            wanted = text_of(server)
            for _ in range(min(BLOWS - 1, args.number - number - 1)):
                kind = random.choice(OF_THE_ENGINE)
                found[kind].append(blow(server, kind, wanted))
            kind = random.choice(OF_THE_FRONT)
            found[kind].append(end(server, kind))
        finally:
            server.process.kill()
            server.process.communicate()
        number = sum(map(len, found.values()))
        path.write_text(json.dumps({"environment": env, **summary(found)}, indent=1) + "\n", encoding="utf-8")
    Console().print(summary(found))
    return 0


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the number of blows of each kind, and the longest seconds."""
    longest = {kind: {name: max(row[name] for row in rows) for name in rows[0]} for kind, rows in found.items()}
    return {"number": {kind: len(rows) for kind, rows in found.items()}, "longest_s": longest}


if __name__ == "__main__":
    raise SystemExit(main())
