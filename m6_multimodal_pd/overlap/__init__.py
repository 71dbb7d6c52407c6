"""Overlapped steps: the device computes step N + 1 while the host books step N.

    normal       host    | schedule N | ........ wait ........ | book N | schedule N+1 | ........ wait ...
                 device               | forward N              |                       | forward N+1

    overlapped   host    | schedule N+1 | wait | sample N, launch N+1 | book N | schedule N+2 | wait | ...
                 device    forward N ......... |                      | forward N+1 .............. |

When step N + 1 is scheduled, the tokens of step N are not known. It is scheduled as if each request had got a token
that ends nothing; a placeholder stands for the token until the launch. Read in this order: `engine_core.py` beside
m4's, `late_results.py` (what differs if a result comes late), `launcher.py` (a forward that nobody waits for) with
`future_map.py`, and `native_thread.py` (what computes meanwhile on a CPU). SGLang: `Scheduler.event_loop_overlap`;
vLLM: `AsyncScheduler`; mini-sglang: `overlap_loop`.
"""
