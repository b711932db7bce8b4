"""What vLLM's users bring: its options at their neutral values, `EngineArgs`, and metrics by vLLM's names.

Read `options.py` first. Imported when an option, a class or a method of vLLM's is used.
"""
