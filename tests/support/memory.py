"""What a piece of code takes of memory, as torch's allocator sees it: the tensors inside an operation count, too."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that `call` holds on the CPU at one time, besides what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    found = profiler.profiler
    assert found is not None and found.kineto_results is not None
    changes = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    assert changes, "the profiler counts no memory"
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
