"""Views of m2: readers of the trace that draw a run."""
