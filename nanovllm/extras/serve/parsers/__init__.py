"""Parse the text of answers: the reasoning and the tool calls, in the formats of different model families.

`parser_registry.py` has the names of `--tool-call-parser` and `--reasoning-parser`. Each format has its own file. Read
`tool_parser.py`, then `hermes.py`.
"""
