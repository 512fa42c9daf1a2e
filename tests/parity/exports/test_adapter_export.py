"""Adapters of our checkpoints, exported for peft, which computes the logits of our training module with them: on the
exported model, and on the original model where the network is the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.exporting import export_adapters
from megatron_coca.commands import export as export_command
from megatron_coca.model import GPT
from tests.checkpoint_files import beginning_tokenizer, write_trained_adapters
from tests.parity.exported import DENSE, GROUPED, LLAMA, NEOX, modules_cache, random_checkpoint
from tests.parity.families.test_families import in_float64

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

ALL = ["query", "key", "value", "dense", "mlp"]
TIED = {"no_weight_tying": False}
GPT2: dict[str, Any] = {"pos_emb": "learned", "activation": "gelu", "bias_gelu_fusion": True} | TIED
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LLaMA": (LLAMA, {}),
    "LLaMA, all matrices": (GROUPED, {"targets": ALL, "also": ["norms", "embedding", "output_head"]}),
    "LLaMA, keys as a whole": (GROUPED, {"targets": ["query", "mlp"], "also": ["key", "attention_output"]}),
    "LLaMA, rsLoRA": (GROUPED, {"rslora": True, "alpha": 7}),
    "LLaMA, DoRA": (GROUPED, {"dora": True, "targets": ALL}),
    "LLaMA, tied": (GROUPED | TIED, {"also": ["embedding", "norms"]}),
    "GPT-NeoX": (NEOX, {}),
    "GPT-NeoX, rsLoRA": (NEOX, {"rslora": True, "targets": ["query", "value"]}),
    "GPT-NeoX, DoRA": (NEOX, {"dora": True, "targets": ["query", "value", "dense"]}),
    "GPT-NeoX, all of attention as a whole": (NEOX, {"targets": ["mlp"], "also": ["query", "key", "value", "norms"]}),
    "GPT-2": (GPT2, {"targets": ALL, "also": ["norms", "embedding"]}),
    "CoCA": (GROUPED | {"pos_emb": "coca"}, {"targets": ALL, "also": ["norms"]}),
    "dense": (DENSE | {"pos_emb": "coca"}, {"also": ["output_head"]}),
    "PoPE": (DENSE | {"pos_emb": "pope"}, {"also": ["positions"]}),
}


def trained(folder: Path, save: Path, lora: dict[str, Any], **keys: Any) -> GPT:
    """As `write_trained_adapters`, with rank 3, in float64."""
    return write_trained_adapters(folder, save, {"rank": 3, "alpha": 5} | lora, torch.float64, **keys)


def tokens(length: int = 48) -> Tensor:
    return torch.randint(500, (2, length), generator=torch.Generator().manual_seed(length))


def of_peft(base: Path, adapters: Path) -> PeftModel:
    with in_float64():
        model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True, dtype=torch.float64)
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # the default has no float64
        return PeftModel.from_pretrained(model, adapters, autocast_adapter_dtype=False).double().eval()


@pytest.mark.parametrize("case", CASES)
def test_peft_computes_the_logits_of_training(case: str, tmp_path: Path) -> None:
    shape, lora = CASES[case]
    base = random_checkpoint(tmp_path / "base", torch.float64, tokenizer=None, **shape)
    model = trained(base, tmp_path / "run", lora)
    batch = tokens(32)
    with torch.no_grad():
        expected, plain = model(batch), load_model(base).double()(batch)
        assert (expected - plain).abs().max() > 0.1
        opened = open_checkpoint(tmp_path / "run")
        torch.testing.assert_close(opened.load(dtype=torch.float64).model(batch), expected, rtol=1e-9, atol=1e-9)
        with pytest.raises(CheckpointError, match="with --with-base FOLDER"):
            export_adapters(tmp_path / "run", tmp_path / "adapters")
        done = export_adapters(tmp_path / "run", tmp_path / "adapters", base=tmp_path / "exported")
        with in_float64():
            theirs = of_peft(done.base, done.folder)(batch).logits
    torch.testing.assert_close(theirs, expected, rtol=1e-9, atol=1e-9)
    read = open_checkpoint(done.folder, overrides={"base_model": str(done.base)})
    with torch.no_grad():
        ours = read.load({"base_model": str(done.base)}, dtype=torch.float64).model(batch)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def original(folder: Path) -> None:
    keys: dict[str, Any] = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    keys |= {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**keys)).double().save_pretrained(folder)


def test_the_original_model_serves_if_the_network_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original(tmp_path / "llama")
    model, batch = trained(tmp_path / "llama", tmp_path / "run", {"also": ["norms"]}), tokens()
    assert export_command.main(["peft", str(tmp_path / "run"), str(tmp_path / "adapters")]) == 0
    assert f"adapters for the model in {tmp_path / 'llama'}" in capsys.readouterr().out
    with torch.no_grad(), in_float64():
        theirs = of_peft(tmp_path / "llama", tmp_path / "adapters")(batch).logits
        torch.testing.assert_close(theirs, model(batch), rtol=1e-9, atol=1e-9)
    changed = trained(tmp_path / "llama", tmp_path / "coca", {}, pos_emb="coca")
    with pytest.raises(CheckpointError, match="network and position method.*--with-base"):
        export_adapters(tmp_path / "coca", tmp_path / "none")
    done = export_adapters(tmp_path / "coca", tmp_path / "of_coca", base=tmp_path / "llama_coca")
    with torch.no_grad(), in_float64():
        theirs = of_peft(done.base, done.folder)(batch).logits
        torch.testing.assert_close(theirs, changed(batch), rtol=1e-9, atol=1e-9)
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match="has no adapters; use `megatron-coca export huggingface`"):
        export_adapters(tmp_path / "llama", tmp_path / "none")


def test_the_tokenizer_is_beside_the_adapters(tmp_path: Path) -> None:
    original(tmp_path / "llama")
    beginning_tokenizer(tmp_path / "llama")
    library = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "llama" / "tokenizer.json"))
    library.save_pretrained(tmp_path / "llama")
    trained(tmp_path / "llama", tmp_path / "run", {})
    done = export_adapters(tmp_path / "run", tmp_path / "adapters")
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (done.base, done.folder))
    text = "The sea was calm, 1 2 3."
    assert ours(text).input_ids == theirs(text).input_ids and len(ours(text).input_ids) > 3
    assert not (done.folder / "generation_config.json").exists() and not (done.folder / "config.json").exists()
    assert open_checkpoint(done.folder, overrides={"base_model": str(done.base)}).tokenizer()[0] is not None


def mixture(folder: Path) -> None:
    keys: dict[str, Any] = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    keys |= {"moe_intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys, num_experts=4, num_experts_per_tok=2))
    model.double().save_pretrained(folder)


def test_attention_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """Experts and routers that are trained as a whole can only be exported merged."""
    mixture(tmp_path / "qwen")
    model, batch = trained(tmp_path / "qwen", tmp_path / "run", {"also": ["norms"]}), tokens()
    export_adapters(tmp_path / "run", tmp_path / "adapters")
    with torch.no_grad(), in_float64():
        theirs = of_peft(tmp_path / "qwen", tmp_path / "adapters")(batch).logits
        torch.testing.assert_close(theirs, model(batch), rtol=1e-9, atol=1e-9)
    for part in ("router", "mlp"):
        changed, run = trained(tmp_path / "qwen", tmp_path / part, {"also": [part]}), tmp_path / f"{part}_merged"
        with pytest.raises(CheckpointError, match="part of a mixture of experts"):
            export_adapters(tmp_path / part, tmp_path / "none")
        assert export_command.main(["huggingface", str(tmp_path / part), str(run)]) == 0
        with torch.no_grad():
            read = open_checkpoint(run).load(dtype=torch.float64).model(batch)
            expected, before = changed(batch), open_checkpoint(tmp_path / "qwen").load(dtype=torch.float64).model(batch)
        torch.testing.assert_close(read, expected, rtol=1e-3, atol=1e-3)
        assert (expected - before).abs().max() > 0.1


@pytest.mark.parametrize("queries", [10, None], ids=["latents", "whole queries"])
@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ["query", "key", "value", "dense"], "also": ["norms"]},
        {"targets": ["query", "dense"], "dora": True},
        {"targets": ["query"], "also": ["key", "value", "attention_output"]},
    ],
    ids=["attention", "DoRA", "keys as a whole"],
)
def test_latent_attention(lora: dict[str, Any], queries: int | None, tmp_path: Path) -> None:
    """Of DeepSeek 3, whose files have the rotated features in another order. One matrix computes keys and values."""
    keys: dict[str, Any] = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    keys |= {"kv_lora_rank": 12, "q_lora_rank": queries, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
    keys |= {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
    }
    keys |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "first_k_dense_replace": 1}
    torch.manual_seed(3)
    DeepseekV3ForCausalLM(DeepseekV3Config(**keys)).double().save_pretrained(tmp_path / "base")
    model, batch = trained(tmp_path / "base", tmp_path / "run", lora), tokens()
    export_adapters(tmp_path / "run", tmp_path / "adapters")
    opened = open_checkpoint(tmp_path / "run")
    with torch.no_grad(), in_float64():
        expected, plain = model(batch), open_checkpoint(tmp_path / "base").load(dtype=torch.float64).model(batch)
        assert (expected - plain).abs().max() > 0.1
        torch.testing.assert_close(opened.load(dtype=torch.float64).model(batch), expected, rtol=1e-9, atol=1e-9)
        theirs = of_peft(tmp_path / "base", tmp_path / "adapters")(batch).logits
    torch.testing.assert_close(theirs, expected, rtol=1e-9, atol=1e-9)
    given = {"base_model": str(tmp_path / "base")}
    with torch.no_grad():
        read = open_checkpoint(tmp_path / "adapters", overrides=given).load(given, dtype=torch.float64).model(batch)
    torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-9)


def test_rows_trained_as_a_whole_beside_adapters_of_one_matrix(tmp_path: Path) -> None:
    """GPT-NeoX's matrix of queries, keys and values is one module for peft. The merged export has no such limit."""
    base = random_checkpoint(tmp_path / "base", tokenizer=None, **NEOX)
    trained(base, tmp_path / "run", {"targets": ["query"], "also": ["key"]})
    with pytest.raises(CheckpointError, match="has adapters and rows"):
        export_adapters(tmp_path / "run", tmp_path / "adapters", base=tmp_path / "exported")
    assert not (tmp_path / "adapters").exists()
    assert export_command.main(["huggingface", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0


def test_a_damaged_checkpoint_is_an_error_that_names_the_weight(tmp_path: Path) -> None:
    base = random_checkpoint(tmp_path / "base", tokenizer=None, **GROUPED)
    trained(base, tmp_path / "run", {"also": ["norms"]})
    folder = native.step_folder(tmp_path / "run", 7)
    opened = open_checkpoint(folder)
    assert opened.base is not None and opened.own_weights is not None
    own = dict(opened.own_weights())

    def damaged(weights: dict[str, Tensor]) -> None:
        save_file(weights, folder / native.WEIGHTS)
        listed = native.read_json(folder / native.MANIFEST)
        listed["files"][native.WEIGHTS] = native.describe(folder / native.WEIGHTS)
        native.write_json(folder / native.MANIFEST, listed)

    name = "blocks.0.attention.query_key_value.query.lora_A.weight"
    damaged({each: value for each, value in own.items() if each != name})
    with pytest.raises(CheckpointError, match="merge .*blocks.0.attention.query_key_value.query"):
        dict(open_checkpoint(folder).weights())
    damaged(own | {"blocks.0.mlp.linear9.lora_A.weight": torch.zeros(3, 32)})
    with pytest.raises(CheckpointError, match=r"linear9\.lora_A\.weight belongs to no weight"):
        open_checkpoint(folder).weights()


def test_a_place_in_a_checkpoint_is_a_folder_that_was_not_downloaded(tmp_path: Path) -> None:
    """A checkpoint of somebody else cannot make us read an address, or open its own adapters without end."""
    base = random_checkpoint(tmp_path / "base", tokenizer=None, **GROUPED)
    trained(base, tmp_path / "run", {})
    folder = native.step_folder(tmp_path / "run", 7)
    meta = native.read_json(folder / native.META)

    def named(**entries: Any) -> str:
        native.write_json(folder / native.META, meta | {"adapts": meta["adapts"] | entries})
        listed = native.read_json(folder / native.MANIFEST)
        listed["files"][native.META] = native.describe(folder / native.META)
        native.write_json(folder / native.MANIFEST, listed)
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(folder)
        return str(raised.value)

    for place in ("hf://gpt2", "s3://bucket/run", "nowhere", "a\0b", "x" * 5000):
        assert "name its folder with --base FOLDER" in named(place=place)
    assert "name its folder with --base FOLDER" in named(base_model="hf://gpt2")
    assert "its adapters change a model that contains these adapters" in named(place="global_step7")
    assert "its adapters change a model that contains these adapters" in named(place=str(tmp_path / "run"))
