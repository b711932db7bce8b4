"""Compatibility with vLLM: its options, `EngineArgs`, and metrics with vLLM's names.

Read `vllm_options.py` first. This folder is imported when an option, a class or a method of vLLM is used.
"""
