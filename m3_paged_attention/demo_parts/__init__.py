"""What `demo.py` shows: its tour, what is to be seen in a block map, and m2 and m3 on the same requests."""
