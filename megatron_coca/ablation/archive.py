"""All results of an ablation in one file: `RESULTS.jsonl.zst`, beside the folder of results that it stands for.

A line is one result file: {"file": "CELL/NAME.json", "content": ...}, with the cell's record (cell.json), its learning
curve, and every number that was measured, by seed, document and length. The folder itself need not be kept.
"""

import json
from pathlib import Path

import zstandard

from megatron_coca.evaluation.results import EvaluationError, write_atomically

LEVEL = 19


def archive_of(results: Path) -> Path:
    """Return the archive that belongs to a folder of results."""
    return results.with_name(f"{results.name}.jsonl.zst")


def pack(results: Path) -> Path:
    """Write the archive of the cells in a folder of results.

    Raises EvaluationError where there is no result or the file cannot be written.
    """
    files = sorted(file for file in results.glob("*/*.json") if (file.parent / "cell.json").is_file())
    if not files:
        raise EvaluationError(f"{results}: holds no results to pack")
    lines = [{"file": str(file.relative_to(results)), "content": json.loads(file.read_bytes())} for file in files]
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    write_atomically(archive_of(results), zstandard.ZstdCompressor(level=LEVEL).compress(text.encode()))
    return archive_of(results)


def unpack(results: Path) -> None:
    """Write the files of the archive, if there is one, that the folder of results lacks. Raises EvaluationError."""
    archive = archive_of(results)
    if not archive.is_file():
        return
    try:
        with zstandard.open(archive, "rt", encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                path = results / entry["file"]
                if not path.resolve().is_relative_to(results.resolve()):
                    raise EvaluationError(f"{archive}: names {entry['file']}, which is outside of {results}")
                if not path.exists():
                    content = json.dumps(entry["content"], indent=2, ensure_ascii=False) + "\n"
                    write_atomically(path, content.encode())
    except (OSError, ValueError, KeyError, zstandard.ZstdError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{archive}: is damaged ({error}); restore it from version control") from error
