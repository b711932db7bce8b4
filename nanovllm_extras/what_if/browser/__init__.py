"""The simulation in a browser, without a server: Pyodide runs the Python files of `bundle.py` in a Web Worker.

`answer.py` is what the worker calls. `requests_form.py` makes requests from numbers, `edited_schedule.py` a scheduler
from a text. `xxh3.py` replaces the library xxhash, which is compiled.
"""
