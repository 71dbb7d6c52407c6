"""The packages that a machine without a network must be given: `python -m benchmarks.device.wheels`.

They are those that the engine needs here, with their versions, and theirs. Of torch it names the build with CUDA, which
brings triton and NVIDIA's libraries; the build here may be the one for CPUs.
"""

import argparse
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

PROJECT = "stepwise-llm"
ADVICE = """\
# On a machine with a network, for the same Python and Linux x86-64:
#   python -m benchmarks.device.wheels > wheels.txt && pip download -d wheels -r wheels.txt
# On the machine without one, in this checkout:
#   pip install --no-index --find-links wheels -r wheels.txt && python -m benchmarks.device
"""


def closure(name: str) -> Iterator[tuple[str, str]]:
    """Yield all packages that `name` needs on this machine, and that those need: names and versions, each once."""
    todo, seen = [name], {name}
    for own in todo:  # grows on the way
        for text in metadata.requires(own) or ():
            needed = Requirement(text)
            other = needed.name.lower().replace("_", "-")
            if other in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            seen.add(other)
            todo.append(other)
            yield other, metadata.version(other)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a requirements file."""
    argparse.ArgumentParser(prog="python -m benchmarks.device.wheels", description=__doc__).parse_args(argv)
    print(ADVICE, end="")
    for name, version in sorted(closure(PROJECT)):
        if not name.startswith(("nvidia-", "triton", "cuda-")):  # they come with the CUDA build of torch
            print(f"{name}=={version.partition('+')[0]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
