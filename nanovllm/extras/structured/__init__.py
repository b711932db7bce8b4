"""Structured output: tokens that fit a JSON schema, a regular expression, a choice or a grammar.

`params.py` says what a request may ask for, `compiler.py` compiles it with llguidance, `grammar.py` is the processor that
masks the logits of a step. Read `grammar.py` first.
"""
