"""Answer files of requests (`nanovllm run-batch`): the answers go to Parquet files, one answer for each row.

Read `replica.py` first: it answers the rows of a chunk with the server's own routes. `batch_inputs.py` cuts files into
chunks, `parts.py` manages the folder of answers, `one_machine.py` and `ray_data.py` are the two ways to run, and
`command.py` is the command, with the options of `batch_options.py`.
"""
