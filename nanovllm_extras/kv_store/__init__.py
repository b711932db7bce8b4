"""The K/V store: full blocks of K and V that outlive their place in the pool, found by their content.

Read `tier.py` first: what a store is. `memory_tier.py` keeps blocks in host memory, `disk_tier.py` in a folder, and
`shared_tier.py` in memory that engines share (`shared_slots.py`). `conversations.py` finds them by a name. Then
`store.py`: how an engine loads and saves, and `ranks.py`: with several ranks. docs/kv_store.md describes the options.
"""
