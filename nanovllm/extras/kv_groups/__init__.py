"""Groups of layers whose K and V have different shapes, as in Gemma 4.

`groups.py` holds the KV cache of each group. `group_runner.py` runs such models, and refuses options that do not work
with them. Read `groups.py` first.
"""
