"""`nanovllm run-batch`: files of requests in, Parquet files of answers out, each row once.

Read `replica.py` first: how the rows of a chunk are answered by the server's own routes. `inputs.py` cuts files into
chunks, `parts.py` is the folder of answers, `one_machine.py` and `ray_data.py` are the two ways to run, `command.py` is
the command.
"""
