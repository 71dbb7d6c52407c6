"""What torch's profiler has seen of a CUDA device."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def step_with_copies(engine: Any) -> tuple[dict[str, Any], int]:
    """The outputs of a step, and the number of copies from the host to the device that it has made."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        outputs = engine.step()
        torch.cuda.synchronize()
    return outputs, sum(each.count for each in seen.key_averages() if each.key.startswith("Memcpy HtoD"))
