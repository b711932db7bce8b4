"""Embeddings: one vector for each prompt, pooled from the hidden states of its tokens.

`params.py` says what a request may ask for, `pooling.py` is the reader that adds hidden states up, `request.py` makes the
vector. Read `request.py` first.
"""
