"""What the text of an answer means: how models of different families write thoughts and calls of tools.

`registry.py` has the names of `--tool-call-parser` and `--reasoning-parser`; each form is a file of its own. Read
`tool_parser.py`, then `hermes.py`.
"""
