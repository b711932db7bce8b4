"""The self-check: at the first start on a machine, the kernels are compared with PyTorch's layers.

A wrong kernel would give wrong text without an error. So before the first request, the fast layers and the attention
backend compute a few steps with the model's own weights, and so do the core's PyTorch layers. `runner_check.py`
compares them, `stored_results.py` remembers the result, so that later starts do not compute it again, and
`fallbacks.py` starts the engine with the next best way to compute if a check fails. Crashes and hangs are found by
`crash_test.py` in a process of its own.
"""
