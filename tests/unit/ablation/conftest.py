"""A small ablation, with changes that a test names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Write = Callable[..., Path]


@pytest.fixture
def write(small: dict[str, Any], corpus: Path, tmp_path: Path) -> Write:
    """write(keys={}, **changes): an ablation of two models and two seeds."""

    def file(keys: dict[str, Any] | None = None, /, **changes: Any) -> Path:
        (tmp_path / "base.json").write_text(json.dumps(small | (keys or {})))
        (tmp_path / "ntk.yml").write_text("rope_scaling: {rope_type: dynamic, factor: 2.0}\n")
        content = {
            "title": "Two",
            "base": [str(tmp_path / "base.json"), "train_iters=6"],
            "seeds": [1, 2],
            "baseline": "RoFormer",
            "results": str(tmp_path / "results"),
            "runs": str(tmp_path / "runs"),
            "models": {
                "RoFormer": {"set": ["pos_emb=rotary"], "variants": {"": [], "+ NTK": [str(tmp_path / "ntk.yml")]}},
                "NoPE": ["pos_emb=none", "rotary_pct=1.0", "max_position_embeddings=2L"],
            },
            "tasks": {"perplexity": {"data": [f"{corpus}/words_test"], "windows": ["1L", "2L"], "stride": "1L"}},
        }
        (tmp_path / "ablation.yml").write_text(yaml.dump(content | changes, sort_keys=False))
        return tmp_path / "ablation.yml"

    return file
