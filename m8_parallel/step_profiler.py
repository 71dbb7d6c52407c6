"""m6's profiler on every rank: each writes a file of its own, into the same folder of its host."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

from m1_single_request.errors import EngineUsageError
from m6_multimodal_pd.step_profiler import StepProfiler
from m8_parallel.ranks import Ranks


class RanksProfiler(StepProfiler):
    """`start` and `stop` are those of all ranks. An error of one is that of all."""

    def __init__(
        self, ranks: Ranks, tell: Callable[[str, str], None], changing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`tell`: sends a verb and its argument to the other ranks. `changing`: of the engine core."""
        super().__init__()
        self.ranks, self.tell, self.changing = ranks, tell, changing

    def start(self, folder: str) -> None:
        """Start recording on all ranks, as m6's does on one."""
        if self._profile is not None:
            raise EngineUsageError("a profile is being recorded already: stop_profile() ends it")
        start = super().start
        with self.changing():
            self.tell("start_profile", folder)
            try:
                self.ranks.agreed(lambda: start(folder))
            except Exception:
                self.drop()
                raise

    def stop(self) -> list[str]:
        """Write the recordings; return the names of all files, rank 0's first."""
        if self._profile is None:
            raise EngineUsageError("no profile is being recorded: start_profile() begins one")
        stop = super().stop
        with self.changing():
            self.tell("stop_profile", "")
            own = msgspec.json.encode(self.ranks.agreed(stop))
            return [name for files in self.ranks.gather_bytes(own) for name in msgspec.json.decode(files)]
