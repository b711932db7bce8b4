"""The engine with all options: `LLMEngine`, what it holds, and the table that chooses these objects by the options.

Read `full_engine.py` first, then `assembly.py`.
"""
