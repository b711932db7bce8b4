"""Measure an OpenAI-compatible server under load (`nanovllm bench serve`).

Read `load_generator.py` first: requests are sent at random times and do not wait for earlier ones (an open loop). Then
read `client.py` (one request over HTTP, as raw bytes with their times), `results.py` (parses the bytes after the load)
and `report.py` (the metrics of all requests). `workloads.py` creates the prompts, `plot.py` draws the picture,
`bench_options.py` has the options, and `benchmark.py` is the command.
"""
