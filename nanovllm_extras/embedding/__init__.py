"""Embeddings: one vector for each prompt, pooled from the hidden states of its tokens. And scores of pairs of texts.

`pooling_params.py` says what a request may ask for, `pooling.py` is the reader that adds hidden states up, and
`embedding_request.py` makes the vector. Read `embedding_request.py` first.

`score.py` is `LLM.score`; `pairs.py` makes the prompts of pairs, and scores of what is read of them.
"""
