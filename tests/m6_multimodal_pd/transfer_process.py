"""Another engine's process, as far as transfers go: both ends of its own memory, told what to do line by line.

A line is `[command, argument]` in JSON, the answer is a line of JSON.
"""

import sys

import msgspec

from m6_multimodal_pd.disaggregation.runtime.messages import Ticket
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from tests.m6_multimodal_pd.transfers import Memory


class Process:
    """Each method is a command; its partner is always called `test`, but `lend` has any target."""

    def __init__(self, owner: str) -> None:
        segments = SharedMemorySegments(owner)
        self.memory = Memory(num_pages=9, seed=9)
        self.source = StagedSource(self.memory.store, segments, num_frames=4, checksums=True)
        self.target = StagedTarget(self.memory.store, segments)

    def lend(self, target: str) -> Ticket | None:
        return self.source.send(target, [9])

    def release(self, number: int) -> None:
        self.source.release("test", number)

    def send(self, pages: list[int]) -> Ticket | None:
        return self.source.send("test", pages)

    def receive(self, ticket_and_pages: tuple[Ticket, list[int]]) -> list[str]:
        """Returns what is in these pages then."""
        ticket, pages = ticket_and_pages
        self.target.receive("test", ticket, pages)
        return [self.memory.page(page).hex() for page in pages]


def main(owner: str) -> None:
    process = Process(owner)
    for line in sys.stdin.buffer:
        name, argument = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
        command = getattr(process, name)
        wanted = next(kind for key, kind in command.__annotations__.items() if key != "return")
        answer = command(msgspec.json.decode(argument, type=wanted))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
