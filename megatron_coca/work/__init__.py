"""Run units of work. `folders` writes the result of a unit under a lock of `locks`. `processes` and `workers` run its
child processes, with `signals` and exit `statuses`. A task of `tasks` repeats a command, and `engines` runs many tasks
on this machine, on Slurm or on Ray.

datatrove submits the tasks to Slurm, and Ray runs them through its own interface. These engines need the extra
`cluster`. A task is the same command with `--part I/N`, so the result files show which work is complete, with and
without an engine.
"""
