"""Imports all of this package while Python looks for no garbage, and with it torch and transformers.

They make a million objects, hardly any of them garbage. Python's collector would look through all of them four times:
0.3 s of the 2.3 s of `import m6_multimodal_pd`. At the end they are made old, as if it had done so, and the collector
is again as the program has set it. vLLM: `freeze_gc_heap`, which exempts them for good.
"""

import gc

is_enabled = gc.isenabled()
gc.disable()
try:
    import m1_single_request.llm_engine  # noqa: F401
finally:
    if not gc.get_freeze_count():  # else the program has frozen objects of its own
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
    if is_enabled:
        gc.enable()
