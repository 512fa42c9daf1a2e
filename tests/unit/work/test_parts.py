"""Parts of a command, and the index that schedulers give to a task."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import yaml

from megatron_coca.work.parts import part_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("2/8", {}, (1, 8)),
        ("2/8", {"SLURM_ARRAY_TASK_ID": "7"}, (1, 8)),
        ("auto/8", {"JOB_COMPLETION_INDEX": "0"}, (0, 8)),
        # `sbatch --array=3`: the variables of Slurm describe an array of one task
        ("auto/16", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "1"}, (3, 16)),
    ],
)
def test_valid_parts(text: str, environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert part_of(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("auto/4", {}, "SLURM_ARRAY_TASK_ID are not set; give I/N"),
        ("auto/4", {"SLURM_ARRAY_TASK_ID": "4"}, "SLURM_ARRAY_TASK_ID is 4, .*from 0 to 3"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "not a part; write I/N"),
        ("5/4", {}, "not a part; write I/N"),
        ("0/4", {}, "not a part; write I/N"),
    ],
)
def test_invalid_parts(text: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        part_of(text, environment)


@pytest.mark.parametrize("name", ["parts_kubernetes.yaml", "kubernetes.yaml"])
def test_the_rules_of_the_manifests_have_all_fields(name: str) -> None:
    """Kubernetes before 1.35 needs `status` in a pattern of conditions; FailIndex needs a limit for each index."""
    job = [*yaml.safe_load_all((ROOT / "configs/cluster" / name).read_text())][-1]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    patterns = [pattern for rule in rules for pattern in rule.get("onPodConditions", ())]
    assert patterns == [{"type": "DisruptionTarget", "status": "True"}]
    assert ("FailIndex" in {rule["action"] for rule in rules}) == ("backoffLimitPerIndex" in job)
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
