"""Measure a server under load (`nanovllm bench serve`), or an extension against the engine (`nanovllm bench compare`).

For a server, read `load_generator.py` first: requests are sent at random times and do not wait for earlier ones (an
open loop). Then read `client.py` (one request over HTTP, as raw bytes with their times), `results.py` (parses the bytes
after the load) and `report.py` (the metrics of all requests). `workloads.py` creates the prompts, `plot.py` draws the
picture, `bench_options.py` has the options, and `benchmark.py` is the command.

For an extension, read `compare.py`. It shares the metrics, and serves requests in processes of its own, without HTTP.
"""
