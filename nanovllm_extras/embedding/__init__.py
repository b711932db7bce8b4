"""Embeddings: one vector for each prompt, pooled from the hidden states of its tokens.

`pooling_params.py` says what a request may ask for, `pooling.py` is the reader that adds hidden states up, and
`embedding_request.py` makes the vector. Read `embedding_request.py` first.
"""
