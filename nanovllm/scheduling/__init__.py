"""Who computes how many tokens in a step, and where their K and V lie: integers alone.

Nothing here knows tensors, text or the model. Read `sequence.py` first, then `step.py`, `scheduler.py` and
`block_manager.py`; the other files are add-ons, one concept each.
"""
