"""What the tests of nanovllm use, for people who write parts of an engine of their own."""
