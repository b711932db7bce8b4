"""The two storeys above the engine: HTTP → async engine → engine. Nothing below knows them.

Read `async_llm.py` first: how many consumers in an event loop share one engine in a thread. Then `app.py`, which lists
the routes, and `chat.py`, one of them. `cli.py` is the command `nanovllm serve`. `terminal/` and `bench/` are clients:
`nanovllm chat` and `nanovllm bench serve`.
"""
