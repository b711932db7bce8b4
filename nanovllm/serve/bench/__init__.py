"""`nanovllm bench serve`: a load generator for any OpenAI-compatible server.

Read `load.py` first: requests leave at random moments, whatever has become of those before (an open loop). Then
`client.py` (one request over HTTP, as raw bytes with their times), `results.py` (what the bytes say, once the load is
over), `report.py` (what all of them say together). `workloads.py` makes the prompts, `plot.py` the picture, `cli.py`
reads the options.
"""
