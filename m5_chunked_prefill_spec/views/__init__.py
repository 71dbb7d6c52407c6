"""Views of m5: readers of the trace that draw."""
