"""Raise the limit of open files."""

import resource

OPEN_FILES = 1 << 16
"""The desired limit of open files, which is more than any run needs. A shard needs two open files."""
TOO_MANY_FILES = (
    "too many open files; raise the limit of this shell with `ulimit -n 65536` (in a job script too; administrators "
    "set it in /etc/security/limits.conf), or join shards"
)


def allow_open_files() -> None:
    """Raise this process's open-file limit, usually 1,024, to OPEN_FILES or the system's maximum if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
