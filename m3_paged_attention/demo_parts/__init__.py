"""Parts of `demo.py`: the tour, the views and facts of a block map, and the comparison of m2 and m3."""
