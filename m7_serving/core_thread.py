"""The thread of the router core: it runs the router's steps, and the event loop never waits for it.

    event loop                         this thread                                engine processes
      add, abort   --- calls --->        between two steps  --- jobs --->           compute
      mailboxes    <-- newest outputs    router's step      <-- tokens ---

Of the outputs that the event loop has not taken, only the newest one of each request is kept, as in a mailbox. Calls
are an add and an abort for each request, and all are executed before the next step. A call wakes this thread while it
waits for tokens, so that a request reaches its engine in time for the engine's next step. New in this milestone. vLLM:
`AsyncMPClient` and `output_handler`; SGLang: `TokenizerManager.handle_loop`.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from m1_single_request.outputs import RequestOutput
from m1_single_request.request import FinishError
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.config import EngineConfig
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.router_core import RouterCore
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.wiring import PARTS, build

IDLE_S = 0.1
"""Seconds between two checks of the engines while there is no request."""

CoreCall = Callable[[RouterCore], None]


class CoreThread(threading.Thread):
    """Builds the router core of a group of engines, and runs its steps until `stop`."""

    core: RouterCore
    """Once `ready` is done. Its steps and calls belong to this thread."""

    def __init__(self, config: EngineConfig, deliver: Callable[[dict[str, RequestOutput]], None]) -> None:
        """`deliver` is called in the running event loop, with the newest output of each request that has changed."""
        super().__init__(name="router core", daemon=True)
        self.config, self.deliver = config, deliver
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        """Done when the core is closed, or has failed: then with the error."""
        self.is_serving = False
        """Whether there is an engine of every role."""
        self._calls: SimpleQueue[CoreCall] = SimpleQueue()
        self._is_stopping = False
        self._newest: dict[str, RequestOutput] = {}
        self._lock = threading.Lock()  # of `_newest`

    # --- for the event loop -------------------------------------------------------------------------------------------

    def submit(self, call: CoreCall) -> None:
        """Let this thread execute `call(core)` between two steps. `call` raises nothing."""
        self._calls.put(call)
        self.core.router.links.wake()

    def stop(self) -> None:
        """End all engines, and this thread. If it is still building them, it ends them afterwards."""
        self._is_stopping = True
        self._calls.put(lambda core: None)  # a wait for tokens ends by itself, within 50 ms

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the event loop call a function, unless the loop is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    # --- inside -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Build the core, run it, close it."""
        tracer = Tracer()
        try:
            for reader in readers_of(self.config.trace):
                tracer.attach(reader)
            core = build(self.config, PARTS, tracer)
            assert isinstance(core, RouterCore), "the configuration is that of a group"
            self.core = core
        except BaseException as error:
            tracer.close()
            self.post(fail, self.ready, error)
            self.post(finish, self.ended, None)
            return
        failure: BaseException | None = None
        try:
            self._check_engines()
            self.post(finish, self.ready, None)
            while not self._is_stopping:
                self._turn()
        except BaseException as error:  # no engine is left, or the core is dead
            failure = error
        finally:
            self.is_serving = False
            try:
                self.core.close()
            except BaseException as error:
                failure = failure or error
            tracer.close()
            self.post(*((finish, self.ended, None) if failure is None else (fail, self.ended, failure)))

    def _turn(self) -> None:
        """Execute the calls that have come, and run a step; wait for a call if there is no request."""
        core = self.core
        with suppress(Empty):
            is_idle = not core.has_unfinished_requests()
            self._calls.get(block=is_idle, timeout=IDLE_S)(core)
            for _ in range(self._calls.qsize()):  # and all others that are there: those that come now wait for a step
                self._calls.get_nowait()(core)
        with core.changing():
            if core.has_unfinished_requests():
                self._keep(core.run_step())
            else:
                core.router.listen(0.0)
            self._check_engines()

    def _check_engines(self) -> None:
        """Note whether the engines can serve. If they cannot, requests that wait for one end now: a client that is told
        can turn to another server, and a restart takes seconds. Raises `EngineLostError` if none will be started."""
        router: Router = self.core.router
        self.is_serving = all(router.of_role(role) for role in router.config.engines)
        if not self.is_serving:
            waiting = [req.rid for req in router.waiting if req.to_finish is None]
            router.finish_requests(waiting, FinishError(EngineLostError("the engine was lost")))
            is_started_here = router.config.address is None
            if is_started_here and not all(map(router.links.coming, router.config.engines)):
                raise EngineLostError("the engines are lost, and none will be started again")

    def _keep(self, outputs: dict[str, RequestOutput]) -> None:
        """Keep outputs for the event loop, in place of older ones that it has not taken."""
        if outputs:
            with self._lock:
                is_posted = bool(self._newest)
                self._newest |= outputs
            if not is_posted:
                self.post(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            newest, self._newest = self._newest, {}
        self.deliver(newest)


def finish(future: "asyncio.Future[Any]", value: Any) -> None:
    """End a future, whose waiter may have been cancelled."""
    if not future.done():
        future.set_result(value)


def fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    """End a future, whose waiter may have been cancelled, with an error."""
    if not future.done():
        future.set_exception(error)
