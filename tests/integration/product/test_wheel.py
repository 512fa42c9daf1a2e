"""The wheel has the whole product: it is built, installed into an empty environment, and used from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_coca import __version__
from tests.conftest import ROOT, clean_environment

pytestmark = pytest.mark.slow

SOURCES = ("configs", "megatron_coca", "LICENSE", "README.md", "pyproject.toml")
MEGABYTE = 2**20


@dataclass(frozen=True)
class Installed:
    """A wheel, and the program of an environment that has it; other packages are those of the tests' environment."""

    wheel: Path
    program: Path

    def run(self, folder: Path, *arguments: str) -> str:
        """Run the program in `folder`, and return what it prints."""
        environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
        command = [str(self.program), *arguments]
        done = subprocess.run(
            command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        subprocess.run(["cp", "--archive", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    shutil.rmtree(source)
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
    Path(purelib, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, python.with_name("megatron-coca"))


def test_what_the_wheel_holds(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert all(name.startswith("megatron_coca/") for name in package)
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {name.removeprefix("megatron_coca/") for name in package if "/configs/" in name} == configs
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_coca").rglob("*.py")}
    assert {name for name in package if name.endswith(".py")} == modules
    data = {name for name in package - modules if "/configs/" not in name}
    kinds = ("*.j2", "*.yaml", "*.json")
    kept = {str(path.relative_to(ROOT)) for kind in kinds for path in (ROOT / "megatron_coca").rglob(kind)}
    assert data == kept
    assert f"megatron_coca-{__version__}.dist-info/licenses/LICENSE" in names
    assert installed.wheel.stat().st_size < 1.5 * MEGABYTE  # 1.06 of code and configurations; a data file would show


def test_several_processes_train_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    assert installed.run(tmp_path, "--version") == f"megatron-coca {__version__}\n"
    installed.run(tmp_path, "configs", "copy", "configs")
    keys = ["train_iters=2", "train_micro_batch_size_per_gpu=2", "eval_interval=2", "eval_iters=1", "save=run"]
    keys.append("distributed_backend=gloo")  # on the CPU
    told = installed.run(tmp_path, "train", "configs/quickstart/roformer_coca.yml", "--num_gpus", "2", *keys)
    assert "step 2/2" in told
    told = installed.run(tmp_path, "inspect", "checkpoint", "run")
    assert "global_step2: step 2, valid" in told


def test_the_quickstart_runs_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    keys = ["train_iters=60", "checkpoint_factor=20", "eval_interval=30", "train_micro_batch_size_per_gpu=8"]
    keys += ["num_layers=2", "hidden_size=32", "num_attention_heads=2"]
    told = installed.run(tmp_path, "quickstart", *keys)
    assert "# killed after step" in told and "RoFormer + CoCA + dynamic NTK" in told
    assert (tmp_path / "runs/quickstart/report.html").is_file() and {*os.listdir(tmp_path)} == {"data", "runs"}
