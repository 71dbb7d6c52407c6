"""Views of m3: readers of the trace that draw a run."""
