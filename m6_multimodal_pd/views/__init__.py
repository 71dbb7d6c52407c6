"""Views of m6: readers of the trace that draw it, live or from a file."""
