"""What the cells of m7's notebook share: a server with clients of plain bytes, the way of a request through it, and an
engine for a front that a lab has broken."""

import asyncio
import functools
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from m1_single_request.config import assemble_config
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.input_processor import InputProcessor
from m7_serving import AsyncLLM, DisaggregationConfig, SchedulerConfig
from m7_serving.config import ServerConfig
from m7_serving.core_thread import CoreThread, finish
from m7_serving.mailbox import Mailbox
from m7_serving.openai import chat
from m7_serving.openai.deltas import Deltas
from m7_serving.server.app import make_app
from m7_serving.server.http_protocol import HttpProtocol
from m7_serving.server.limits import Limits
from m7_serving.server.run import Server, bound_socket, uvicorn_config

IN_PROCESS = DisaggregationConfig(both=1, transport="in_process")
"""One engine, in this process: it runs on the core thread."""


# --- a server and its clients -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A whole answer of a server."""

    status: int
    headers: dict[str, str]
    body: str


class Served:
    """A server in this event loop, for clients that write and read plain bytes."""

    def __init__(self, app: Any, port: int) -> None:
        self.app, self.port = app, port

    async def send(self, path: str, fields: Any = None, *headers: str) -> Answer:
        """Send a request, with a JSON body if there are fields; return its answer."""
        reader, writer = await self._begin(path, fields, headers)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().strip()
            status, *lines = head.split("\r\n")
            found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(found["content-length"]))
        finally:
            writer.close()
        return Answer(int(status.split()[1]), found, body.decode())

    async def events(self, path: str, fields: Any) -> AsyncGenerator[str, None]:
        """Yield the texts of an event stream. Closing the generator closes the connection."""
        reader, writer = await self._begin(path, fields, ())
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").decode().strip()
                    if line.startswith(b"data: [DONE]"):
                        return
        finally:
            writer.close()

    async def _begin(
        self, path: str, fields: Any, headers: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = b"" if fields is None else json.dumps(fields).encode()
        lines = [f"{'GET' if fields is None else 'POST'} {path} HTTP/1.1", "Host: lesson", *headers]
        if fields is not None and not any(line.startswith("Content-Type") for line in headers):
            lines += ["Content-Type: application/json"]
        writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        return reader, writer


@asynccontextmanager
async def serving(llm: AsyncLLM, **settings: Any) -> AsyncGenerator[Served, None]:
    """Serve an engine at a free port of this machine until the end of the context; `settings`: of `ServerConfig`."""
    config = ServerConfig(port=0, **settings)
    app = make_app(llm, config)
    with bound_socket(config) as sock:
        server = Server(uvicorn_config(app, config))
        running = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield Served(app, sock.getsockname()[1])
        finally:
            server.should_exit = True
            await running


# --- the way of a request ---------------------------------------------------------------------------------------------

STATIONS: tuple[tuple[Any, str, str], ...] = (
    (HttpProtocol, "data_received", "HTTP protocol: bytes of a client"),
    (Limits, "__call__", "limits: the size of the headers, the type of the body"),
    (chat, "generation", "route: the body is valid, and its model is served"),
    (AsyncLLM, "generate_batch", "admission: fewer than max_requests are unfinished"),
    (InputProcessor, "process_request", "chat template, tokens, checks"),
    (Mailbox, "__init__", "a mailbox for the newest output"),
    (CoreThread, "submit", "add_request is handed to the core thread"),
    (Mailbox, "put", "the newest output lies in the mailbox"),
    (Deltas, "of", "a delta: what is new since the output before"),
)
"""Functions that a request passes, and what each of them does for it."""
EVENTS = ("request_added", "request_routed", "result", "finish")
REPORTED = ("batch", "result")
"""Events of the router, and of the engine."""
REQUEST_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
CORE = "core thread"


class Journey(TraceReader):
    """Notes on the way of one request through the server: seconds, place, text."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str, str]] = []
        self._began = time.perf_counter()

    def note(self, text: str, place: str | None = None) -> None:
        """Add a note; its place is the running thread. The request is called ann: its own id has 32 digits."""
        place = place or place_of(threading.current_thread())
        self.notes.append((time.perf_counter() - self._began, place, REQUEST_ID.sub("ann", text)))

    def note_event(self, data: str) -> None:
        """Note an event that the client has received, without the fields that all chunks share."""
        if data != "[DONE]":
            (choice,) = json.loads(data)["choices"]
            data = f"delta {json.dumps(choice['delta'], ensure_ascii=False)}"
            if choice["finish_reason"]:
                data += f", finish_reason {choice['finish_reason']}"
        self.note(data, "client")

    def read(self, record: TraceRecord) -> None:
        """Note an event of the trace."""
        event: Any = record.event
        if event.kind == "reported" and event.what in REPORTED:
            self.note(event.text, event.engine)
        elif event.kind in EVENTS:
            self.note(event.explain())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note each call of a station, from now on until the end of the context."""
        self.notes.clear()
        self._began = time.perf_counter()
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in STATIONS]
        try:
            for (owner, name, text), (_, _, original) in zip(STATIONS, originals, strict=True):
                setattr(owner, name, self._noting(original, text))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _noting(self, original: Callable[..., Any], text: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def station(*arguments: Any, **keywords: Any) -> Any:
            if place_of(threading.current_thread()) != CORE:  # an engine of this process has an input processor, too
                self.note(text)
            return original(*arguments, **keywords)

        return station


def place_of(thread: threading.Thread) -> str:
    """Return the place of a note that a thread makes."""
    if isinstance(thread, CoreThread):
        return CORE
    return "tokenizer" if thread.name.startswith("tokenizer") else "event loop"


# --- engines for a front ----------------------------------------------------------------------------------------------


class Backend:
    """The model that ships, on a core thread: `add` and `abort`. It calls `deliver` with the outputs of each step."""

    deliver: Callable[[dict[str, RequestOutput]], None]
    _thread: CoreThread

    @classmethod
    async def start(cls, *, max_num_seqs: int) -> "Backend":
        """Return when the model is loaded."""
        backend, limits = cls(), SchedulerConfig(max_num_seqs=max_num_seqs)
        configs = {"disaggregation_config": IN_PROCESS, "scheduler_config": limits}
        config = assemble_config(EngineConfig, DEFAULT_MODEL, None, configs)
        backend._thread = CoreThread(config, lambda outputs: backend.deliver(outputs))
        backend._thread.start()
        await backend._thread.ready
        return backend

    def add(self, rid: str, prompt: Any, params: SamplingParams) -> None:
        """Queue a request."""
        process = self._thread.core.input_processor.process_request
        self._submit("add_request", process(rid, prompt, params, number=0, arrival_time=time.monotonic()))

    def abort(self, rid: str) -> None:
        """Abort a request."""
        self._submit("abort_request", rid)

    async def stats(self) -> Any:
        """Return the totals of the engine."""
        answer = asyncio.get_running_loop().create_future()
        self._thread.submit(lambda core: self._thread.post(finish, answer, core.stats()))
        return await answer

    async def close(self) -> None:
        """End the engine."""
        self._thread.stop()
        await self._thread.ended

    def _submit(self, verb: str, argument: Any) -> None:
        def call(core: Any) -> None:
            with core.changing():
                getattr(core, verb)(argument)

        self._thread.submit(call)
