"""The measurements of lesson 2: batches of three kinds, the two limits of a batch, and the padding."""

from benchmarks.lesson import Lesson, Parts, Size


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m2 import measures

    work = measures.workload(6 if size.quick else measures.NUM_REQUESTS)
    return {
        "throughput": lambda: measures.throughput(work, size.rounds),
        "phases": lambda: measures.phases(work),
        "limits": lambda: measures.limits(work, size.few),
        "padding": lambda: measures.padding(work),
        "walls": lambda: measures.walls(work),
        "timeline": measures.timeline,
    }


LESSON = Lesson("m2_continuous_batching", parts)
