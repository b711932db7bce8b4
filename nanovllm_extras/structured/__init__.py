"""Structured output: constrain the tokens by a JSON schema, a regular expression, a choice or a grammar.

`structured_params.py` defines the fields of a request, `compiler.py` compiles them with llguidance, and `grammar.py` is
the logits processor that masks the logits of a step. Read `grammar.py` first.
"""
