"""Operators' calls: what each does to a running server, and the socket on which nobody else can send them."""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from m4_radix_cache import DiskError
from m6_multimodal_pd.config import DEFAULT_MODEL
from m7_serving import AsyncLLM, ConfigError, EngineClosedError, SamplingParams
from m7_serving.config import ServerConfig
from m7_serving.server.operators import default_path, make_operators_app, unix_socket
from tests.m7_serving.conftest import IN_PROCESS
from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import COMPLETION, asynchronous, check_error, running
from tests.m7_serving.test_server_run import serving

SHORT, LONG = SamplingParams(max_tokens=8), SamplingParams(max_tokens=300, ignore_eos=True)


@pytest.fixture
def log_level() -> Iterator[None]:
    """The level of the log stays in its test."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@asynccontextmanager
async def operator(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the calls for an engine."""
    transport = httpx.ASGITransport(app=make_operators_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
        yield client


async def text_of(llm: AsyncLLM, params: SamplingParams = SHORT) -> str:
    """The answer to a prompt."""
    output = [output async for output in llm.generate("What is a KV cache?", params)][-1]
    return output.outputs[0].text


def test_a_pause_lets_running_requests_end_and_new_ones_wait(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> None:
        async with operator(llm) as client:
            running = asyncio.create_task(text_of(llm, LONG))
            while not (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            busy = await client.post("/flush_cache")
            check_error(busy.status_code, busy.json(), 409)
            assert (await client.post("/pause")).status_code == 200
            assert running.done(), "the pause waits for it"
            waiting = asyncio.create_task(text_of(llm))
            await asyncio.sleep(0.2)
            assert not waiting.done() and llm.num_unfinished == 1
            assert (await client.post("/flush_cache")).status_code == 200
            assert (await llm.stats()).evictable_size == 0
            assert (await client.post("/continue")).status_code == 200
            assert await waiting == await text_of(llm)

    runner.run(act())


def test_a_disk_that_is_not_flushed_is_named(
    runner: asyncio.Runner, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(_: Any) -> None:
        raise DiskError("the disk with /kv hangs: it is not flushed")

    async def act() -> None:
        async with operator(llm) as client:
            monkeypatch.setattr(llm, "call", hangs)
            answer = await client.post("/flush_cache?tier=disk")
            error = check_error(answer.status_code, answer.json(), 503)
            assert error["code"] == "disk_unavailable" and "/kv hangs" in error["message"]

    runner.run(act())


def test_a_pause_that_is_ended_before_it_has_begun_is_an_error(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> None:
        async with operator(llm) as client:
            running = asyncio.create_task(text_of(llm, LONG))
            while not (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            pausing = asyncio.create_task(client.post("/pause"))
            await asyncio.sleep(0.05)
            assert (await client.post("/continue")).status_code == 200
            early = await pausing
            check_error(early.status_code, early.json(), 409)
            assert not running.done()
            await running

    runner.run(act())


@asynchronous
async def test_a_server_that_shuts_down_answers_what_waits_since_a_pause() -> None:
    llm: Any = FakeLLM()
    resumed = asyncio.Event()
    llm.admission, llm.resume = resumed.wait, resumed.set
    async with serving(llm) as server, httpx.AsyncClient(base_url=server.url) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        while not llm.num_unfinished:
            await asyncio.sleep(0.01)
        server.signal()
        assert (await waiting).status_code == 200


def test_a_client_that_leaves_during_a_pause_leaves_nothing(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> None:
        await llm.pause()
        waiting = asyncio.create_task(text_of(llm))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert llm.num_unfinished == 0
        llm.resume()

    runner.run(act())


def test_the_end_of_the_engine_ends_a_pause() -> None:
    async def act() -> None:
        llm = await AsyncLLM.start(disaggregation_config=IN_PROCESS)
        await llm.pause()
        waiting = asyncio.create_task(text_of(llm))
        await asyncio.sleep(0.1)
        await llm.close()
        with pytest.raises(EngineClosedError):
            await waiting

    asyncio.run(act())


def test_weights_are_replaced_between_requests(runner: asyncio.Runner, llm: AsyncLLM, tmp_path: Path) -> None:
    async def act() -> None:
        before = await text_of(llm)
        async with operator(llm) as client:
            wrong = await client.post("/update_weights", json={"model": str(tmp_path / "nowhere")})
            check_error(wrong.status_code, wrong.json(), 400)
            running = asyncio.create_task(text_of(llm, LONG))
            while not (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            busy = await client.post("/update_weights", json={"model": str(DEFAULT_MODEL)})
            check_error(busy.status_code, busy.json(), 409)
            await running
            assert (await client.post("/update_weights", json={"model": str(DEFAULT_MODEL)})).status_code == 200
        assert await text_of(llm) == before

    runner.run(act())


def test_a_text_that_cannot_be_sent_to_an_engine_is_an_error_of_the_call(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    for text in ("\ud800", "x" * 5000):
        with pytest.raises(ConfigError, match="must be valid text of at most 4,096 characters"):
            runner.run(llm.call(lambda core, text=text: core.call_all("start_profile", text)))  # type: ignore[misc]


def test_a_profile_is_written(runner: asyncio.Runner, llm: AsyncLLM, tmp_path: Path) -> None:
    async def act() -> None:
        async with operator(llm) as client:
            wrong = await client.post("/start_profile", json={"folder": "/proc"})  # not even root may
            check_error(wrong.status_code, wrong.json(), 400)
            folder = {"folder": str(tmp_path / "profiles")}
            assert (await client.post("/start_profile", json=folder)).status_code == 200
            again = await client.post("/start_profile", json=folder)
            check_error(again.status_code, again.json(), 409)
            await text_of(llm)
            (name,) = (await client.post("/stop_profile")).json()["files"]
            assert Path(name).parent == tmp_path / "profiles" and Path(name).stat().st_size > 0
            none = await client.post("/stop_profile")
            check_error(none.status_code, none.json(), 409)

    runner.run(act())


@pytest.mark.usefixtures("log_level")
def test_the_level_of_the_log(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> None:
        async with operator(llm) as client:
            assert (await client.post("/log_level", json={"level": "debug"})).status_code == 200
            assert logging.getLogger().level == logging.DEBUG
            for body in ({"level": "loud"}, {"level": "info", "logger": "m7"}, {}):
                wrong = await client.post("/log_level", json=body)
                check_error(wrong.status_code, wrong.json(), 400)

    runner.run(act())


# --- the socket -------------------------------------------------------------------------------------------------------


CALLS = [route.path.removeprefix("/") for route in make_operators_app(FakeLLM()).routes if "POST" in route.methods]


def test_the_calls_are_on_the_socket_alone(tmp_path: Path) -> None:
    async def act() -> None:
        path = tmp_path / "operators.sock"
        async with serving(operator_socket=str(path)) as server:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                answer = await client.post("/log_level", json={"level": "warning"})
                assert (answer.status_code, answer.json()) == (200, {})
                assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 404
            async with httpx.AsyncClient(base_url=server.url) as client:
                for name in CALLS:
                    assert (await client.post(f"/{name}", json={})).status_code == 404
            server.signal()
        assert not path.exists()

    asyncio.run(act())


def test_without_a_path_the_port_is_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def act() -> None:
        async with serving() as server:
            port = int(server.url.rpartition(":")[2])
            assert default_path(port) == tmp_path / f"stepwise-{port}.sock" and default_path(port).is_socket()
            server.signal()

    asyncio.run(act())


def test_a_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "operators.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with unix_socket(path):  # also while its server loads the model, and accepts nothing
        with pytest.raises(OSError, match=r"cannot listen at .*Address already in use"), unix_socket(path):
            pass
        assert path.is_socket()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(OSError, match="cannot listen"), unix_socket(path):
        pass
    assert path.read_text() == "a file"


@pytest.mark.parametrize("path", ["/nowhere/at/all.sock", "x" * 200])
def test_a_path_that_cannot_be_used_is_an_error_before_the_model_is_loaded(path: str, tmp_path: Path) -> None:
    async def start() -> Any:
        raise AssertionError("the model is loaded")

    from m7_serving.server.run import serve

    with pytest.raises(OSError, match="cannot listen at"):
        asyncio.run(serve(start, ServerConfig(port=0, operator_socket=path), print))


def test_a_socket_whose_server_accepts_nothing_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting.connect(str(path))
        with pytest.raises(OSError, match="Address already in use"), unix_socket(path):
            pass


def test_the_mask_of_new_files_is_as_before(tmp_path: Path) -> None:
    before = os.umask(0o022)
    with unix_socket(tmp_path / "a.sock"):
        assert os.umask(0o022) == 0o022
    os.umask(before)


def test_the_page_of_the_public_address_names_no_call() -> None:
    async def act() -> None:
        async with running() as server:
            paths = (await server.get("/openapi.json")).json()["paths"]
            assert not {f"/{name}" for name in CALLS} & set(paths)

    asyncio.run(act())
