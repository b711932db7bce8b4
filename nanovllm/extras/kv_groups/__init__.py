"""Groups of layers that need different blocks of K and V. There are two kinds of such models.

Some layers see a window and others see all tokens, as in gpt-oss and Gemma 3: `layer_groups.py` divides the layers,
`grouped_blocks.py` has a block table for each group, and `grouped_runner.py` runs the model. Read `layer_groups.py`
first.

K and V of layers have different shapes, as in Gemma 4: `groups.py` holds a KV cache for each group, with one block
table for all, and `group_runner.py` runs the model and refuses options that do not work with it.
"""
