"""Groups of layers that need different blocks of K and V.

Some layers see a window and others see all tokens, as in gpt-oss and Gemma 3. `layer_groups.py` divides the layers;
read it first. `grouped_tables.py` has a block table for each group, `grouped_layout.py` the KV cache, and
`grouped_graphs.py` the CUDA graphs. `memory/block_manager.py` decides which sequence owns which block of each group.

If K and V of these layers have different shapes, as in Gemma 4, `equal_blocks.py` divides a block, and
`equal_blocks_layout.py` makes the KV cache, with the same files for the rest. If there is one block table for all
layers, `shapes_layout.py` makes a KV cache for each shape (`groups.py`).
"""
