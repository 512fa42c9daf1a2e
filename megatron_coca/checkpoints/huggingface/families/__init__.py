"""Architectures of transformers, one file for each maker. Each is a row of `FAMILIES` (see `keys.Family`).

Folders of GPT-NeoX and LLaMA can also hold CoCA models. `gpt_neox.py` and `llama.py` read and write these themselves.
"""

from megatron_coca.checkpoints.huggingface.families import (
    bigcode,
    bloom,
    cohere,
    fairseq,
    gemma,
    gemma4,
    glm,
    gpt,
    granite,
    llama_like,
    mistral,
    modernbert,
    olmo,
    phi,
    qwen,
)
from megatron_coca.checkpoints.huggingface.families.keys import Family

MAKERS = (
    *(bigcode, bloom, cohere, fairseq, gemma, gemma4, glm, gpt, granite, llama_like, mistral, modernbert, olmo, phi),
    *(qwen,),
)
"""The modules with families."""
ORDER = (
    *("qwen2", "mistral", "ministral3", "qwen3", "smollm3", "olmo2", "olmo3", "phi3", "gemma2", "gemma3_text"),
    *("cohere2", "gpt2", "mpt", "bloom", "falcon", "gemma4_text", "gemma4_unified_text", "gemma", "vaultgemma"),
    *("stablelm", "phi", "persimmon", "starcoder2", "cohere", "cohere_compass_text", "glm", "glm4", "exaone4"),
    *("ernie4_5", "seed_oss", "hunyuan_v1_dense", "nemotron", "arcee", "apertus", "helium", "olmo"),
    *("ministral", "nanochat", "jais2", "cwm", "modernbert-decoder", "internlm3", "iquestcoder", "granite"),
    *("granite_swa", "granitemoehybrid", "hyperclovax", "gptj", "codegen", "gpt_bigcode", "gpt_neo", "opt"),
    *("openai-gpt", "ctrl", "xglm", "biogpt", "gpt-sw3"),
)
"""The order in which an export tries families. Families that are not in this list come last."""
_ROWS: dict[str, Family] = {}
for _maker in MAKERS:
    _ROWS |= _maker.FAMILIES
FAMILIES: dict[str, Family] = {name: _ROWS[name] for name in dict.fromkeys((*ORDER, *_ROWS))}
"""`model_type` -> architecture."""
