"""Fixtures of the tests of training in one process."""

from typing import Any

import pytest

from megatron_coca.config import load_config
from megatron_coca.training.corpus import Corpus, open_corpus
from tests.checkpoint_files import run_alone


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one process, without a process group."""
    run_alone(monkeypatch)


@pytest.fixture(scope="module")
def opened(small: dict[str, Any]) -> Corpus:
    return open_corpus(load_config([], small))
