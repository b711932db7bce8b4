"""This machine and this process: limits, threads, forks, the terminal, and processes in which a kernel may crash."""
