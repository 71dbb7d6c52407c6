"""What `demo.py` shows: what is asked in its tour, how it is measured, and what is to be seen in the trace."""
