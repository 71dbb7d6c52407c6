"""Typical mistakes in a mailbox, each with the hint that it must get."""

from m1_single_request.outputs import RequestOutput
from m7_serving.mailbox import Mailbox


class Queue(Mailbox):
    """Every output waits in a queue."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(request_ids)
        self.queue: list[dict[int, RequestOutput]] = []

    def put(self, output: RequestOutput) -> None:
        index = self.unfinished[output.request_id]
        super().put(output)
        self.queue.append({index: output})

    async def take(self) -> dict[int, RequestOutput]:
        if not self.queue:
            await super().take()
        return self.queue.pop(0) if self.queue else {}


class GivesItsOwn(Mailbox):
    """The result is the mailbox's own dictionary."""

    async def take(self) -> dict[int, RequestOutput]:
        taken = await super().take()
        self._newest = taken
        return taken


class NeverCleared(Mailbox):
    """After the first output no call waits: the stream ends as soon as its reader is faster than the engine."""

    async def take(self) -> dict[int, RequestOutput]:
        taken = await super().take()
        self._is_filled.set()
        return taken


class LosesTheEnd(Mailbox):
    """Without an unfinished request there is nothing to return."""

    async def take(self) -> dict[int, RequestOutput]:
        return await super().take() if self.unfinished or self._error else {}


class EndsWithTheFirst(Mailbox):
    """The first request that ends is the end of the call."""

    async def take(self) -> dict[int, RequestOutput]:
        if self.num_requests > len(self.unfinished) and not self._newest and self._error is None:
            return {}
        return await super().take()

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(request_ids)
        self.num_requests = len(request_ids)


class WaitsAfterTheEnd(Mailbox):
    """Every call waits for something new, also after the end."""

    async def take(self) -> dict[int, RequestOutput]:
        await self._is_filled.wait()
        return await super().take()


class FailsInSilence(Mailbox):
    """The error is noted, and nobody is woken."""

    def fail(self, error: Exception) -> None:
        self._error = error
        self.unfinished.clear()


class ErrorComesLast(Mailbox):
    """Outputs that were not read come before the error."""

    async def take(self) -> dict[int, RequestOutput]:
        if self._error is not None and self._newest:
            newest, self._newest = self._newest, {}
            return newest
        return await super().take()


WRONG = [
    (Queue, "a newer output replaces the one in it"),
    (GivesItsOwn, "begin a new one"),
    (NeverCleared, "wait again"),
    (LosesTheEnd, "its last output was not read yet"),
    (EndsWithTheFirst, "an empty result would end its stream"),
    (WaitsAfterTheEnd, "Nothing will come any more"),
    (FailsInSilence, "`fail` must wake the reader"),
    (ErrorComesLast, "The error comes before outputs"),
]
