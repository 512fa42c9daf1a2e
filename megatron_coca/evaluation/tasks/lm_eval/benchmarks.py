"""Facts about published long-context benchmarks: the sources of their data, and the layout of their tables.

Nothing here imports lm-evaluation-harness, so that reports and `tools/fetch_benchmarks.py` work without it.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

PUNKT = "nltk_data/tokenizers/punkt_tab"
"""The folder of the sentence splitter for ruler's niah tasks, below the folder of `--datasets`."""
ESSAYS = "baber/paul_graham_essays"
SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
HOTPOT = (
    "https://huggingface.co/datasets/namlh2004/hotpotqa/resolve/7e54db4656209750ff487f6fdf8e39a66dba136b/"
    "hotpot_dev_distractor_v1.json"
)
BABILONG = "RMT-team/babilong-1k-samples"
LONGBENCH = "Xnhyacinth/LongBench"

BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "ruler": (ESSAYS, PUNKT, SQUAD, HOTPOT),
    "babilong": (BABILONG,),
    "longbench": (LONGBENCH,),
    "longbench2": ("recursal/longbench-v2",),
    "infinitebench": ("xinrongzhang2022/InfiniteBench",),
}
"""The data sources of each benchmark: names of data sets on the Hugging Face hub, addresses of files, and `PUNKT`."""

READ_BY_CODE: Mapping[str, tuple[str, ...]] = {
    **{f"niah_utils.niah_single_{number}": (ESSAYS, PUNKT) for number in (2, 3)},
    "niah_utils.niah_single_1": (PUNKT,),
    **{f"niah_utils.niah_multikey_{number}": (PUNKT,) for number in (2, 3)},
    **{f"niah_utils.niah_{name}": (ESSAYS, PUNKT) for name in ("multikey_1", "multiquery", "multivalue")},
    "qa_utils.get_squad": (SQUAD,),
    "qa_utils.get_hotpotqa": (HOTPOT,),
}
"""The sources that the code of a task reads, by the function that the task's key `custom_dataset` names."""

LOCAL_FORMATS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text", "xml"})
"""Values of `dataset_path` that name a file format, not a data set."""


def sources_of(dataset_path: object, function: str) -> tuple[str, ...]:
    """Return the sources of a task with this `dataset_path`. `function` is the task's `custom_dataset`; "" if it has
    none.
    """
    own = [dataset_path] if isinstance(dataset_path, str) and is_remote(dataset_path) else []
    return (*own, *READ_BY_CODE.get(function, ()))


def is_remote(dataset_path: str) -> bool:
    """Return True if a task's `dataset_path` names a data set on the hub: neither a file format nor a local path."""
    return bool(dataset_path) and dataset_path not in LOCAL_FORMATS and not Path(dataset_path).exists()


def place_of(source: str, folder: Path) -> Path:
    """Return the local path of a source below the folder of `--datasets`.

    A data set of the hub is in OWNER/NAME, as `hf download` and `git clone` write it. A file from the web is in
    HOST/PATH, as `wget -x` writes it.
    """
    address = urlsplit(source)
    return folder / f"{address.netloc}{address.path}" if address.netloc else folder / source


# Tables


RULER_TASKS = (
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot"),
)
"""The tasks of RULER's tables, in the paper's order."""

BABILONG_TASKS = tuple(f"babilong_qa{number}" for number in range(1, 21))

LONGBENCH_ENGLISH: Mapping[str, tuple[str, ...]] = {
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot Learning": ("trec", "triviaqa", "samsum"),
    "Code Completion": ("lcc", "repobench-p"),
    "Synthetic Tasks": ("passage_count", "passage_retrieval_en"),
}
"""The columns of LongBench's English table and the tasks of each."""
LONGBENCH_CHINESE: Mapping[str, tuple[str, ...]] = {
    "Single-Doc QA": ("multifieldqa_zh",),
    "Multi-Doc QA": ("dureader",),
    "Summarization": ("vcsum",),
    "Few-shot Learning": ("lsht",),
    "Code Completion": ("lcc", "repobench-p"),
    "Synthetic Tasks": ("passage_retrieval_zh",),
}
LONGBENCH_BUCKETS: Mapping[str, tuple[int, int | None]] = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}
"""The columns of LongBench-E's tables: the least number of words, and the number at which the next column begins."""


def bucket_of(words: int) -> str:
    """Return the column of LongBench-E's tables for a document of `words` words."""
    return next(
        name for name, (least, end) in LONGBENCH_BUCKETS.items() if words >= least and (end is None or words < end)
    )
