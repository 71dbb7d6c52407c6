"""Typical mistakes in the receiving end of a KV transfer, each with the hint that it must get."""

from m6_multimodal_pd.disaggregation.poll import KVPoll, KVReceiver
from m6_multimodal_pd.errors import TransferError


class CountsTwice(KVReceiver):
    """A chunk that comes again is a chunk like any other."""

    def expects(self, number: int, pages: range) -> bool:
        return not self.state.is_final and self.state is not KVPoll.BOOTSTRAPPING

    def arrived(self, pages: range) -> None:
        super().arrived(pages)


class OldIsAnError(KVReceiver):
    """A chunk that comes again is an error."""

    def expects(self, number: int, pages: range) -> bool:
        if not self.state.is_final and number < self.num_chunks:
            raise TransferError("it came before")
        return super().expects(number, pages)


class WaitsForEver(KVReceiver):
    """Any number of chunks may be announced, also one that cannot be right."""

    def first_token_arrived(self, num_chunks: int) -> bool:
        if self.state.is_final or self.announced is not None:
            return False
        if self.state is KVPoll.BOOTSTRAPPING:
            raise TransferError("there is no room")
        self.announced = num_chunks
        return True


class LastChunkCompletes(KVReceiver):
    """With all pages it is complete, whether the first token is there or not."""

    def complete(self) -> bool:
        is_there = not self.state.is_final and self.next_page == self.end_page
        return is_there and self.state is not KVPoll.BOOTSTRAPPING and self._go(KVPoll.SUCCESS, "all pages are there")


class NoneIsNought(KVReceiver):
    """An announcement of no chunks is taken for no announcement."""

    def complete(self) -> bool:
        return bool(self.announced) and super().complete()


class LateIsAnError(KVReceiver):
    """A chunk of a transfer that is over is checked like any other, and is an error."""

    def expects(self, number: int, pages: range) -> bool:
        if self.state is KVPoll.FAILED:
            raise TransferError("the transfer has failed")
        return super().expects(number, pages)


class ForgetsTheAnnouncement(KVReceiver):
    """A chunk is checked for its number and its pages, and not for what is announced."""

    def expects(self, number: int, pages: range) -> bool:
        announced, self.announced = self.announced, None
        try:
            return super().expects(number, pages)
        finally:
            self.announced = announced


class ReportsNothing(KVReceiver):
    """The state is set without a word."""

    def arrived(self, pages: range) -> None:
        self.state = KVPoll.TRANSFERRING
        self.num_chunks, self.next_page = self.num_chunks + 1, pages.stop


WRONG = [
    (CountsTwice, "`num_chunks` is the number of the next one"),
    (OldIsAnError, "A message may come twice"),
    (WaitsForEver, "nobody should wait for them"),
    (LastChunkCompletes, "the announced number of chunks, and all pages; not before"),
    (NoneIsNought, "0 is a number of chunks, too"),
    (LateIsAnError, "may still be on its way"),
    (ForgetsTheAnnouncement, "no page would be left for it"),
    (ReportsNothing, "TRANSFERRING is entered once"),
]
