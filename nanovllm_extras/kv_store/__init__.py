"""The K/V store: full blocks of K and V that outlive their place in the pool, found by their content.

Read `tier.py` first: what a store is. `memory_tier.py` keeps blocks in host memory, `disk_tier.py` in a folder, and
`shared_tier.py` in memory that engines share (`shared_slots.py`). `conversations.py` finds them by a name. `store.py`
has the tiers of an engine, and `ranks.py` those of several ranks. `memory/store_link.py` decides what is loaded and
saved. docs/kv_store.md describes the options.
"""
