"""The data of a trial of fine-tuning are prepared again if they change."""

import os
from pathlib import Path

from megatron_coca.evaluation.stretch.finetuning import digest_of


def test_other_texts_have_another_name(tmp_path: Path) -> None:
    folder, file = tmp_path / "texts", tmp_path / "one.txt"
    folder.mkdir()
    inside = folder / "two.txt"
    for path in (file, inside):
        path.write_text("first")
        os.utime(path, ns=(0, 0))
    names = [
        digest_of([folder, file], "tokenizer"),
        digest_of([folder, file], "another"),
        digest_of([file], "tokenizer"),
    ]
    for path in (file, inside):
        path.write_text("other")  # as many bytes
        os.utime(path, ns=(1, 1))
        names.append(digest_of([folder, file], "tokenizer"))
    assert len(set(names)) == 5 and digest_of([folder, file], "tokenizer") == names[-1]
