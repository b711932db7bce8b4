"""Where scheduling and tensors meet: a scheduled step becomes a batch, the batch becomes token ids.

Nothing here decides what is computed, and nothing knows a request or its text. Read `batch.py` first, then
`model_runner.py`, `kv_cache.py` and `sampler.py`; the other files are add-ons, or run once at start-up.
"""
