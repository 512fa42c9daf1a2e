"""A two-column paper with the tables and a figure of a report compiles, with any letters in the labels."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_coca.evaluation import build_report
from megatron_coca.evaluation.report.latex import LETTERS
from tests.patience import patience
from tests.unit.evaluation.report_cases import ablation, every_result, perplexity, write

pytestmark = pytest.mark.slow
PAPER = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs,graphicx}
\begin{document}
%s
\begin{figure}[t]\includegraphics[width=\columnwidth]{figures/perplexity-1.pdf}\caption{Perplexity.}\end{figure}
See Table~\ref{tab:headline}. \newpage
%s
\listoftables
\end{document}
"""
LABELS = ("旋转位置编码 [2]", "한국어, עברית & Ж", r"50% of #1_a \ {x} ~ ^ $ <b> | θ → ∞ 😀", '"quoted" – ½ †')


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    results = every_result() | ablation(models=2, seeds=2, lengths=2)[0]
    for number, label in enumerate(LABELS):
        results[f"label_{number}"] = perplexity(label, {512: 2.0 + number, 1024: 2.5}, documents__sha256="ee")
    write(folder / "results", results)
    build_report([folder / "results"], folder / "report", "A paper 长", papers=True)
    return folder / "report"


@pytest.mark.parametrize("engine", ["pdflatex", "lualatex"])
def test_a_two_column_paper_compiles(report: Path, engine: str) -> None:
    if shutil.which(engine) is None:
        pytest.skip(f"needs {engine}: apt-get install texlive-latex-recommended texlive-luatex")
    tables = sorted(path.name for path in (report / "tables").glob("*.tex"))
    inputs = [rf"\input{{tables/{name}}}\clearpage" for name in tables]
    letters = " ".join(LETTERS)  # with spaces, so that lines break
    (report / "paper.tex").write_text(PAPER % (letters, "\n".join(inputs)), encoding="utf-8")
    command = [engine, "-interaction=nonstopmode", "-halt-on-error", "-file-line-error", "paper.tex"]
    for _ in range(2):  # the second time with references
        done = subprocess.run(command, cwd=report, capture_output=True, timeout=patience(300), check=False)
        log = done.stdout.decode(errors="replace")
        assert done.returncode == 0, log[-3000:]
    assert len(tables) > 20 and (report / "paper.pdf").read_bytes().startswith(b"%PDF")
    assert "undefined references" not in log and "multiply defined" not in log
    overfull = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
    assert max(overfull, default=0.0) < 50, "tables do not leave the page"
    if engine == "pdflatex" and (reader := shutil.which("pdftotext")):
        text = subprocess.run([reader, "paper.pdf", "-"], cwd=report, capture_output=True, check=True).stdout.decode()
        assert "U+65CB" in text and "RoFormer" in text
