"""What code made a number or a checkpoint."""

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path


def code_versions() -> dict[str, str]:
    """Versions of this package, its commit where the sources are a git checkout, and the libraries that decide
    numbers.
    """
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    source = Path(__file__).resolve().parents[2]
    git = shutil.which("git")
    if git and (source / ".git").exists():
        answer = subprocess.run(
            [git, "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            versions["commit"] = answer.stdout.strip()
    return versions
