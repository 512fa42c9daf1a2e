"""A preparation on several hosts: jobs and nodes of a Ray cluster that are killed, and the same bytes."""

import contextlib
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from megatron_coca.data import load_tokenizer
from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation.engines import make_on_ray, open_blocks
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.readers.source import SourceSpec

ROOT = Path(__file__).resolve().parents[2]
QUIET = Execution(progress=False)
RULES = Rules(valid_fraction=0.1, test_fraction=0.1)
NODE_KILLS, WORKER_KILLS, DRIVER_KILLS = 4, 12, 3
SMALL = "from megatron_coca.data.preparation import blocks; blocks.BLOCK_BYTES = 1 << 20, 1 << 20"
"""A block for each megabyte."""
TASK = "ray::"
"""Names the processes of a cluster's tasks."""


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    chosen, folder = random.Random(1), tmp_path_factory.mktemp("corpus")
    words = ["".join(chosen.choices("abcdefghij", k=chosen.randrange(2, 9))) for _ in range(3000)]
    paths = []
    for number in range(12):
        texts = [" ".join(chosen.choices(words, k=chosen.randrange(1, 600))) for _ in range(3000)] + ["twice"]
        paths.append(folder / f"{number:02}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return paths


@pytest.mark.slow
def test_jobs_that_are_killed(corpus: list[Path], tmp_path: Path) -> None:
    """Two jobs of an array, each killed at random moments until it ends, and then the merge, killed as well."""
    chosen, kills = random.Random(2), 0
    start = f"{SMALL}; import sys; from megatron_coca.cli import main; sys.exit(main(['prepare', *sys.argv[1:]]))"
    line = [sys.executable, "-c", f"if __name__ == '__main__': exec({start!r})", "--input"]
    line += [f"c={path}" for path in corpus]
    line += ["--tokenizer-type", "CharLevelTokenizer", "--workers", "1", "--save-seconds", "0.1", "--output"]
    subprocess.run([*line, str(tmp_path / "whole")], check=True, capture_output=True, cwd=ROOT)
    for part in (["--part", "1/2"], ["--part", "2/2"], []):
        for attempt in range(100):
            process = subprocess.Popen([*line, str(tmp_path / "out"), *part], cwd=ROOT, stdout=subprocess.DEVNULL)
            try:
                assert process.wait(chosen.uniform(0.5, 1.5) + attempt / 10) == 0
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                if (tmp_path / "out").exists():  # killed after its work
                    break
    assert kills > 5
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.slow
def test_nodes_workers_and_drivers_that_are_killed(
    corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers are killed until one ends, and meanwhile nodes of the cluster and processes of its tasks."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray has no wheel for this machine")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sources = [CorpusSource(SourceSpec("c", corpus))]
    characters = load_tokenizer("CharLevelTokenizer")
    whole = prepare(sources, tmp_path / "whole", characters, RULES, QUIET)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", (1 << 20, 1 << 20))
    blocks = open_blocks(sources, tmp_path / "out", characters, RULES)
    assert len(blocks) > len(corpus), "files are divided"
    job = f"{SMALL}; from tests.integration.test_prepare_cluster import drive; import sys; drive(*sys.argv[1:])"
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    chosen, kills = random.Random(3), Counter[str]()
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        arguments = [cluster.address, str(tmp_path / "out"), *map(str, corpus)]
        while blocks.missing() and sum(kills.values()) < 400:
            driver = subprocess.Popen([sys.executable, "-c", job, *arguments], cwd=ROOT)
            ends = time.monotonic() + chosen.uniform(4, 10) if kills["driver"] < DRIVER_KILLS else math.inf
            while driver.poll() is None and time.monotonic() < ends:
                time.sleep(chosen.uniform(0.3, 1.2))
                tasks = [p for p in psutil.process_iter(["cmdline"]) if TASK in " ".join(p.info["cmdline"] or [])]
                if kills["node"] < NODE_KILLS and chosen.random() < 0.3:
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)
                    nodes.append(cluster.add_node(num_cpus=1))
                    kills["node"] += 1
                elif tasks and kills["worker"] < WORKER_KILLS:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        chosen.choice(tasks).kill()
                        kills["worker"] += 1
            if driver.poll() is None:
                driver.kill()
                kills["driver"] += 1
            driver.wait()
    finally:
        cluster.shutdown()
    print(kills)
    assert not blocks.missing() and min(kills[kind] for kind in ("node", "worker", "driver")) > 0
    done = prepare(sources, tmp_path / "out", characters, RULES, QUIET)
    assert everything(done.parent) == everything(whole.parent)


def drive(address: str, output: str, *corpus: str) -> None:
    """The process that gives out the blocks."""
    sources = [CorpusSource(SourceSpec("c", [Path(path) for path in corpus]))]
    make_on_ray(open_blocks(sources, Path(output), load_tokenizer("CharLevelTokenizer"), RULES), address, QUIET)
