"""The measurements of lesson 1: recomputing against a KV cache, one request, a queue, and the roofline."""

from benchmarks.lesson import Lesson, Parts, Size


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m1.measures import LENGTHS, PAIRS, Bench

    bench = Bench(2 if size.quick else size.rounds)
    lengths, pairs = (LENGTHS[:2], PAIRS[1:2]) if size.quick else (LENGTHS, PAIRS)
    return {
        "token_at": lambda: [bench.token_at(n) for n in lengths],
        "answer": lambda: [bench.answer(*pair) for pair in pairs],
        "first_token": lambda: [bench.first_token(n) for n in lengths],
        "next_token": lambda: [bench.next_token(n) for n in lengths],
        "step_phases": lambda: bench.step_phases(256),
        "queue": bench.queue,
        "roofline": lambda: bench.roofline(lengths),
    }


LESSON = Lesson("m1_single_request", parts, rounds=9, threads=1)
