"""Views of m4: readers of the trace that draw."""
