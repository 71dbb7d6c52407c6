"""Groups of engines under faults, for an hour: killed in every state (`matrix`), and used at random (`soak`).

    python -m tests.kills.matrix    answers, times and leaks after each kill
    python -m tests.kills.soak      violations of what the engines promise

Not part of any suite. `--record` replaces their results in `benchmarks/results`, which lesson 6 shows.
"""
