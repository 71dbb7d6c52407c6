"""Deliberate faults, and the program that tries whether the tests find them: `python -m tests.faults`."""
