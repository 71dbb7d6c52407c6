"""Overlapped steps: the host books step N and schedules step N + 2 while the device computes step N + 1.

    normal      host    | schedule N | ....... wait ....... | book N | schedule N+1 | ....... wait ....... |
                device               | step N              |                       | step N+1            |

    overlapped  host    | schedule N+1 | launch N+1 | . wait . | book N | schedule N+2 | launch N+2 | . wait . |
                device    step N ..................... | step N+1 ..................................... | step N+2

When step N + 1 is launched, the tokens of step N are not known. It is scheduled as if each request had got a token that
ends nothing; a placeholder stands for that token until the device replaces it. Read in this order: `engine_core.py`
beside m4's, `launched_step.py` and `late_results.py` (what differs if a result comes late), `launcher.py` (a step that
nobody waits for) with `future_map.py` and `choice.py` (tokens that the device knows first), and `whole_step.py` (a step
for m4's `native_thread.py`, which is the device on a CPU). SGLang: `Scheduler.event_loop_overlap`; vLLM:
`AsyncScheduler`; mini-sglang: `overlap_loop`.
"""
