"""A progress bar for long batches in a terminal (vLLM: `use_tqdm` of `LLM.generate`)."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 1.0  # seconds; a shorter batch shows no bar


class BatchProgress:
    """Progress bar of finished requests on stderr, removed at the end.

    `show`: True or False; None shows it on a terminal if the batch takes longer than one second.
    """

    def __init__(self, total: int, *, show: bool | None) -> None:
        console = Console(stderr=True)
        self._begin = time.monotonic() + (PATIENCE if show is None else 0.0)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal if show is None else show),
        )
        self._task = self._bar.add_task("requests", total=total)

    def update(self, num_finished: int) -> None:
        """Set the number of finished requests."""
        if time.monotonic() >= self._begin:
            self._bar.start()
            self._bar.update(self._task, completed=num_finished)

    def __enter__(self) -> "BatchProgress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
