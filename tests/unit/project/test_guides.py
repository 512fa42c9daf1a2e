"""Carry out "How to add a position method" and "How to add a backend" of CONTRIBUTING.md on a copy of the repository.

One process tests the copy and writes its pages.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment
from tests.documents import blocks
from tests.patience import patience

METHODS, FORMULAS = "megatron_coca/methods/frequency_extensions.py", "megatron_coca/attention/positions/frequencies.py"
EMBEDDINGS, BIASES = "megatron_coca/methods/embeddings.py", "megatron_coca/attention/positions/bias.py"
BACKEND, DECLARED = "megatron_coca/attention/backends/rows.py", "megatron_coca/config/backends.py"
CODE = {METHODS, FORMULAS, EMBEDDINGS, BIASES, BACKEND, DECLARED}
"""The code files that an extension, a bias and a backend add or change: two each."""
DENSE, ORACLE, CASES = (
    "tests/reference/dense.py",
    "tests/reference/frequencies.py",
    "tests/parity/attention/test_attention_extensions.py",
)
SERVED = "tests/parity/attention_cases.py"

SOURCE = '''"""Dense attention, one query at a time."""

import torch
from torch import Tensor

from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Needs, attend_by_document


class RowsBackend:
    """Causal attention of one segment, without a bias."""

    def supports(self, needs: Needs) -> str | None:
        more = needs.bias or needs.dropout or needs.gates or needs.bands != (CAUSAL,)
        return "it computes one causal segment without bias, dropout and gates" if more else None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        return attend_by_document(_attend, inputs)


def _attend(inputs: AttentionInputs) -> Tensor:
    (segment,), groups = inputs.segments, inputs.query.shape[1] // inputs.value.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (segment.key, inputs.value))
    rows = []
    for row in range(segment.query.shape[2]):
        seen = inputs.past + row + 1
        scores = inputs.scale * segment.query[:, :, row, None] @ key[:, :, :seen].mT
        rows.append(scores.softmax(-1) @ value[:, :, :seen])
    return torch.cat(rows, dim=2)
'''
PROGRAM = """
import sys
import pytest, torch
from docs import generate
from megatron_coca import build_model, load_config
sys.argv = ["docs/generate.py"]
generate.main()
keys = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64, "seed": 1}
keys |= {"pos_emb": "coca", "rope_scaling": {"rope_type": "root", "factor": 4.0}}
ids, found = torch.arange(20)[None], []
for backend in ("rows", "sdpa"):
    model = build_model(load_config(keys | {"attention_backend": backend})).eval()
    with torch.no_grad():
        found.append(model(ids))
torch.testing.assert_close(*found)
print("same logits")
cases = ["tests/parity/attention/test_attention_extensions.py::test_extensions"]
cases += ["tests/parity/attention/test_attention.py::test_float64"]
sys.exit(pytest.main(["-p", "no:cacheprovider", "--tb=short", "-rA", "-k", "coca-root or rows or fall-sdpa", *cases]))
"""


def add(file: Path, before: str, row: str) -> None:
    """Add a row before the only place of a text."""
    text = file.read_text()
    assert text.count(before) == 1, f"{file}: {before!r} occurs {text.count(before)} times"
    file.write_text(text.replace(before, row + before))


def rows_of_the_guide(declared: str) -> list[str]:
    """The lines of the block that begins with a declaration."""
    (block,) = [block for block in blocks("CONTRIBUTING.md", "text") if block.lstrip().startswith(declared)]
    return [line.strip() for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the extension and the bias of the guide, and with a backend, before any page is written."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("megatron_coca", "tests", "docs", "configs", "studies"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True)
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy2(ROOT / file, root)
    declaration, formula, oracle = rows_of_the_guide("PositionEmbedding")
    add(root / EMBEDDINGS, '        PositionEmbedding(\n            "sandwich"', f"        {declaration}\n")
    add(root / BIASES, '    "sandwich": lambda', f"    {formula}\n")
    add(root / DENSE, '    "sandwich": _sandwich', f"    {oracle}\n")
    declaration, formula = rows_of_the_guide("FrequencyExtension")
    add(root / METHODS, '        FrequencyExtension(\n            "ntk_fixed"', f"        {declaration}\n")
    add(root / FORMULAS, '    "proportional": _proportional,\n}', f"    {formula}\n")
    add(
        root / ORACLE, '    "proportional": _proportional,\n}', '    "root": lambda e, j: e.theta(j) / e.factor**0.5,\n'
    )
    add(root / CASES, '    "proportional": {"rope_type"', '    "root": {"rope_type": "root", "factor": 4.0},\n')
    (root / BACKEND).write_text(SOURCE)
    add(
        root / DECLARED,
        '    "triton": DeclaredBackend',
        '    "rows": DeclaredBackend("rows.RowsBackend", "an example"),\n',
    )
    add(root / SERVED, '    "flex": FlexBackend(compiled=False),\n}', '    "rows": RowsBackend(),\n')
    add(root / SERVED, '        "sdpa": not maps,\n', '        "rows": not maps and case.pos_emb not in BIASED,\n')
    imported = "from megatron_coca.attention.backends.rows import RowsBackend\n"
    add(root / SERVED, "from megatron_coca.attention.backends.sdpa", imported)
    return root


@pytest.fixture(scope="module")
def tested(copy: Path) -> str:
    """What the process on the copy printed."""
    command = [sys.executable, "-c", PROGRAM]
    environment = clean_environment({"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"})
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=patience(300), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_methods_and_the_backend_have_the_values_of_the_oracle(tested: str) -> None:
    assert "same logits" in tested
    assert re.search(r"PASSED .*test_float64\[fall-sdpa\]", tested)
    assert re.search(r"PASSED .*test_extensions\[coca-root-100\]", tested)
    assert re.search(r"PASSED .*test_float64\[coca-rows\]", tested)


@pytest.mark.slow
@pytest.mark.usefixtures("tested")
def test_the_pages_know_all_three(copy: Path) -> None:
    """No code file changes but the two of each."""
    attention, backends = ((copy / "docs" / name).read_text() for name in ("attention.md", "backends.md"))
    assert (
        "| `root` | `theta_j / sqrt(s)` | `factor`" in attention
        and "`-ln(1 + r)`" in attention
        and "| `rows` | an example |" in backends
    )
    assert (
        "root" in (copy / "README.md").read_text()
        and "merge \\| flex \\| rows" in (copy / "docs/config.md").read_text()
    )
    changed = {
        str(file.relative_to(copy))
        for file in (copy / "megatron_coca").rglob("*.py")
        if not (ROOT / file.relative_to(copy)).is_file()
        or file.read_bytes() != (ROOT / file.relative_to(copy)).read_bytes()
    }
    assert changed == CODE
