"""A unit of work: its lock (`locks`), its result (`folders`), its child process (`processes`, `workers`) with signals
(`signals`) and exit statuses (`statuses`), a command as a task that is repeated (`tasks`), and engines that run many
tasks on this machine, on Slurm or on Ray (`engines`).

datatrove submits the tasks to Slurm, and Ray runs them through its own interface (extra `cluster`). A task is the same
command with `--part I/N`, so the result files decide which work is complete, on every engine and without an engine.
"""
