"""What `nanovllm.LLM` takes of this package, by the entry points of pyproject.toml: attention backends and networks."""
