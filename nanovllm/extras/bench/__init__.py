"""`nanovllm bench serve`: a load generator for any OpenAI-compatible server.

Read `load.py` first: requests leave at random moments and wait for no earlier one (an open loop). Then `client.py` (one
request over HTTP, as raw bytes with their times), `results.py` (what the bytes say, once the load is over), `report.py`
(what all of them say together). `workloads.py` makes the prompts, `plot.py` the picture, `options.py` has the options,
`benchmark.py` is the command.
"""
