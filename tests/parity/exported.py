"""Small checkpoints with random weights, norms and biases included, for the tests of exports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.model_source import modelling_file
from megatron_coca.checkpoints.huggingface.write import MODELLING_FILE
from megatron_coca.config import load_config
from megatron_coca.data import Tokenizer
from megatron_coca.model import build_model
from tests.checkpoint_files import BYTES, write_checkpoint

TRAINED = 32
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": TRAINED}
SHAPE |= {"vocab_size": 500, "pos_emb": "rotary", "no_weight_tying": True}
NEOX: dict[str, Any] = {"rotary_pct": 0.5, "gpt_j_residual": True}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "intermediate_size": 156,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "use_bias_in_norms": False,
}
GROUPED = LLAMA | {"num_kv_heads": 2}
DENSE: dict[str, Any] = {"norm": "rmsnorm", "num_kv_heads": 2, "gpt_j_residual": True, "rms_norm_epsilon": 1e-5}
"""Of neither shape: grouped queries with GPT-NeoX's parallel residual, plain MLP and biases."""


def random_checkpoint(
    save: Path, dtype: torch.dtype = torch.float32, tokenizer: Tokenizer | None = BYTES, **keys: Any
) -> Path:
    """A checkpoint of one step as a run leaves it, as far as evaluation and export read it."""
    config = load_config([], SHAPE | keys)
    torch.manual_seed(0)
    weights = {
        name: (weight + 0.1 * torch.randn(weight.shape)).to(dtype)
        for name, weight in build_model(config).state_dict().items()
    }
    return write_checkpoint(save, config, weights, tokenizer)


def tokens(length: int, rows: int = 2) -> Tensor:
    """int64 [rows, length], the same at every call."""
    return torch.randint(500, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where transformers copies modelling files to, in place of the user's own folder."""
    from transformers import dynamic_module_utils

    folder, look = tmp_path_factory.mktemp("modules"), dynamic_module_utils.get_imports
    known: dict[bytes, list[str]] = {}

    def get_imports(filename: str) -> list[str]:
        """As transformers', which parses the same file for every model, and takes longer than the model itself."""
        text = Path(filename).read_bytes()
        if text not in known:
            known[text] = look(filename)
        return known[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(dynamic_module_utils, "get_imports", get_imports)
        patch.syspath_prepend(str(folder))
        yield folder


def remote(checkpoint: Path, folder: Path, *overrides: str, attention: str = "sdpa", **settings: Any) -> Any:
    """The exported model as transformers loads it with the modelling file, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    done = export(checkpoint, folder, overrides)
    assert done.remote
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation=attention, **settings
    )
    return loaded.eval()


def names_in_the_file(folder: Path) -> dict[str, Any]:
    """What the modelling file, written to `folder`, defines, loaded as transformers does."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    (folder / MODELLING_FILE).write_text(modelling_file())
    return get_class_from_dynamic_module("modeling_coca.Positions", str(folder)).__init__.__globals__
