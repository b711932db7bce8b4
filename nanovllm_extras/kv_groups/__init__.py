"""Groups of layers that need different blocks of K and V.

Some layers see a window and others see all tokens, as in gpt-oss and Gemma 3: `layer_groups.py` divides the layers,
`grouped_blocks.py` has a block table for each group, and `grouped_runner.py` runs the model. Read `layer_groups.py`
first. Swap, the K/V store, CUDA graphs and ranks are in `grouped_swap.py`, `grouped_store.py`, `grouped_graphs.py` and
`group_ranks.py`.

If K and V of these layers have different shapes, as in Gemma 4, `equal_blocks.py` divides a block, and
`equal_blocks_runner.py` runs the model, with the same files for the rest. If there is one block table for all layers,
`groups.py` has a KV cache for each shape, and `group_runner.py` runs the model.
"""
