"""Reading Hugging Face folders of GPT-NeoX and LLaMA shape, the CoCA authors' own among them."""

from pathlib import Path

from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.huggingface.files import has_t_projection, weight_files
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.weights import Weights, joined, open_safetensors


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` holds a Hugging Face config.json."""
    return (path / "config.json").is_file()


def open_weights(folder: Path, num_layers: int, num_heads: int, tied: bool) -> Weights:
    """The weights of our model, in the dtype on disk. Raises CheckpointError."""
    files = weight_files(folder)
    config = read_json(folder / "config.json")
    heads = weight_map.Heads(num_heads, config.get("num_key_value_heads") or num_heads)
    rows = (
        weight_map.GPT_NEOX
        if config["model_type"] == "gpt_neox"
        else weight_map.llama("t_proj" if has_t_projection(files) else "k_proj")
    )
    absent_if_tied = {"final_linear.weight"} if tied else set()
    wanted = [
        row
        for row in weight_map.expand(rows, num_layers)
        if row.ours not in absent_if_tied and (not row.ours.endswith(".bias") or row.theirs[0] in files)
    ]
    theirs = {name: files[name] for row in wanted for name in row.theirs if name in files}
    return joined(open_safetensors(theirs, folder), wanted, heads)
