"""Exports in engines with their own cache of keys, like the transformers backends of vLLM and SGLang."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_coca import methods
from megatron_coca.checkpoints.huggingface.config_json import NETWORK_KEYS
from megatron_coca.checkpoints.huggingface.serving import servings
from megatron_coca.config import load_config
from tests.parity.exported import (
    DENSE,
    GROUPED,
    LLAMA,
    NEOX,
    SHAPE,
    TRAINED,
    modules_cache,
    names_in_the_file,
    random_checkpoint,
    remote,
    tokens,
)

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

STRICT = {"rtol": 1e-5, "atol": 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "coca": NEOX | {"pos_emb": "coca"},
    "coca_strict, yarn": GROUPED | {"pos_emb": "coca_strict", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "learned": NEOX | {"pos_emb": "learned", "max_position_embeddings": 128},
    "dense, coca": DENSE | {"pos_emb": "coca"},
    "sinusoidal": LLAMA | {"pos_emb": "sinusoidal"},
    "coca, dynamic": GROUPED | {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "coca, clex": LLAMA | {"pos_emb": "coca", "rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "coca, rerope": GROUPED | {"pos_emb": "coca", "relative_positions": {"type": "rerope", "window": 8}},
    "xpos": LLAMA | {"pos_emb": "xpos"},
    "alibi": GROUPED | {"pos_emb": "alibi"},
}


def exported(name: str, tmp_path: Path) -> Any:
    return remote(random_checkpoint(tmp_path / "run", **CASES[name]), tmp_path / "exported")


class Engine:
    """An attention function that keeps the keys it is given, as serving engines do, and knows no mask."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, told: str, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None and told == "passed through"
        before = self.kept.get(module.layer_idx)
        k, v = (torch.cat((old, new), dim=2) for old, new in zip(before, (k, v), strict=True)) if before else (k, v)
        self.kept[module.layer_idx] = [k, v]
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    ALL_ATTENTION_FUNCTIONS["an_engine"] = made
    yield made
    del ALL_ATTENTION_FUNCTIONS["an_engine"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["coca", "coca_strict, yarn", "learned", "sinusoidal", "dense, coca"])
def test_an_engine_keeps_keys(name: str, engine: Engine, tmp_path: Path) -> None:
    """The new tokens alone, with their positions, as vLLM's and SGLang's transformers backends call the model."""
    model = exported(name, tmp_path)
    batch = tokens(50, 1)
    expected = model(batch).logits
    model.set_attn_implementation("an_engine")
    steps = []
    for start, stop in ((0, 30), (30, 31), (31, 50)):
        where = torch.arange(start, stop)[None]
        given = {"position_ids": where, "use_cache": False, "told": "passed through", "return_dict": False}
        steps.append(model.lm_head(model.base_model(batch[:, start:stop], **given)[0]))
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **STRICT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["learned", "dense, coca"])
def test_an_engine_may_compile(name: str, engine: Engine, tmp_path: Path) -> None:
    """As one graph of any length; vLLM compiles the model so."""
    model = exported(name, tmp_path)
    expected = model.base_model(tokens(30, 1)).last_hidden_state
    model.set_attn_implementation("an_engine")
    compiled = torch.compile(model.base_model, backend="eager", fullgraph=True, dynamic=True)
    given = {"position_ids": torch.arange(30)[None], "use_cache": False, "told": "passed through"}
    torch.testing.assert_close(compiled(tokens(30, 1), **given).last_hidden_state, expected, **STRICT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coca, dynamic", "an_engine caches rotated keys.*dynamic"),
        ("coca, clex", "caches rotated keys"),
        ("xpos", "caches rotated keys.*pos_emb xpos"),
        ("alibi", "attn_implementation: an_engine .* use eager or sdpa"),
        ("coca, rerope", "use eager or sdpa"),
    ],
)
def test_what_an_engine_cannot_serve(name: str, message: str, engine: Engine, tmp_path: Path) -> None:
    model = exported(name, tmp_path)
    model.set_attn_implementation("an_engine")
    with pytest.raises(ValueError, match=message):
        model(tokens(5, 1), use_cache=False)


@pytest.mark.parametrize("name", CASES)
def test_serve_answers_as_the_file_does(name: str, engine: Engine, tmp_path: Path) -> None:
    model = exported(name, tmp_path)
    model.set_attn_implementation("an_engine")
    try:
        model(tokens(5, 1), use_cache=False, told="passed through")
        refused = None
    except ValueError as error:
        refused = str(error).removeprefix("attn_implementation: an_engine ")
    first, *keeping = servings(tmp_path / "exported")
    assert first.commands and [each.program for each in keeping] == ["vLLM", "SGLang"]
    for each in keeping:
        assert bool(each.commands) == (refused is None)
        assert refused is None or each.notes == (f"{each.program} {refused}",)


def test_what_vllm_reads_in_the_source(tmp_path: Path) -> None:
    """vLLM 0.32, fusers/attention.py and fusers/qkv.py: one call of a name that is assigned from the table of attention
    functions, with the scale; and each projection called once. All of it in `forward` itself.
    """
    forward = textwrap.dedent(inspect.getsource(names_in_the_file(tmp_path)["CocaDenseAttention"].forward))
    nodes = list(ast.walk(ast.parse(forward)))
    looked_up = [
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS[")
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    (dispatch,) = (call for call in calls if ast.unparse(call.func) in looked_up)
    assert "self.scaling" in [ast.unparse(word.value) for word in dispatch.keywords if word.arg == "scaling"]
    for projection in ("q_proj", "k_proj", "v_proj"):
        assert [ast.unparse(call) for call in calls].count(f"self.{projection}(hidden_states)") == 1


class OnOneDevice(TorchDispatchMode):
    """Refuses tensors that are elsewhere: while a CUDA graph is recorded, none may come from the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, Tensor) or leaf.device.type == "meta", function
        return result


def from_the_host(*_: Any, **__: Any) -> None:
    raise AssertionError("a tensor is made of numbers on the host")


SERVED = tuple(name for name in methods.names("rope_scaling", length_dependent=False) if name != "default")


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "scaling", "logit_scaling"),
    [
        *(("coca", scaling, "log_n" if scaling in SERVED[::2] else "none") for scaling in (None, *SERVED)),
        *(
            ("coca_strict", None, "log_n"),
            ("rotary", None, "none"),
            ("none", None, "log_n"),
            ("sinusoidal", None, "none"),
        ),
    ],
)
def test_tables_are_made_where_the_positions_are(
    form: str,
    scaling: str | None,
    logit_scaling: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The meta device stands for a GPU; it does not show tensors that are made of the host's numbers."""
    names = names_in_the_file(tmp_path)
    position: dict[str, Any] = {"pos_emb": form, "logit_scaling": logit_scaling}
    position["rope_scaling"] = None if scaling is None else {"rope_type": scaling, "factor": 4.0, "proportion": 0.5}
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    flat = load_config([], SHAPE | LLAMA).flat()
    shape |= {"intermediate_size": 8, "network": {name: flat[name] for name in NETWORK_KEYS}}
    config = names["CocaDenseConfig"](**shape, max_position_embeddings=TRAINED, position=position)
    with torch.device("meta"):
        model = names["CocaDenseModel"](config).eval()
        new = torch.zeros(1, 70, dtype=torch.long)
    model.set_attn_implementation("an_engine")
    for place in (torch, torch.Tensor):
        for maker in ("tensor", "new_tensor", "as_tensor"):
            monkeypatch.setattr(place, maker, from_the_host, raising=False)
    with OnOneDevice():
        hidden = model(input_ids=new, position_ids=new, use_cache=False, told="passed through").last_hidden_state
    assert hidden.shape == (1, 70, 32)
