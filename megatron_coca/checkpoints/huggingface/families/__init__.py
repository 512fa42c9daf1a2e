"""Architectures of transformers, one file for each maker.

Each architecture is a row of `FAMILIES` (see `parts.keys.Family`).

Folders of GPT-NeoX and LLaMA can also hold CoCA models. `gpt_neox.py` and `llama.py` read and write these two
architectures without a row; the only row in `llama.py` is that of Llama 4.

A row can use these helpers:

| part of a row | helpers | file |
|---|---|---|
| `rows`, LLaMA's names | `like_llama`, `PRE`, `POST`, `SANDWICH`, `QK_HEAD`, `QK_PROJECTION` | `weight_map.py` |
| other norms | `ONE_NORM`, `QK_LAYERNORM` | `parts/tables.py` |
| its changes | `renamed`, `ungated`, `with_norm_bias`, `with_head_bias`, `norms_of_sums` | `parts/tables.py` |
| `rows`, other names | `transformer`, `modules_of`, `layer_rows`, `Row` | `weight_map.py` |
| | `separate`, with `EMBEDDING`, `POSITIONS`, `HEAD` | `parts/tables.py` |
| how weights are packed | `SINGLE`, `STACKED`, `BY_HEAD`, `NEIGHBOURS`, `FUSED` | `weight_map.py` |
| | `TURNED`, `FUSED_TURNED`, `GATE_FIRST` | `weight_map.py` |
| a table as a function of the model | `rows_of` | `parts/defaults.py` |
| `fixed` | `MODERN` (LLaMA's block), `PLAIN_MLP` (without a gate), `LAYERNORM` (GPT-2's) | `parts/defaults.py` |
| a table with mixtures of experts | `with_experts`, `ExpertNames` | `parts/experts.py` |
| their `keys`, `read` and `write` | `TOP_K`, `ROUTER_LOSS`, `at_least_two`, `expert_layers` | `parts/experts.py` |
| | `counted_experts` | `parts/experts.py` |
| | `sparse_steps`, `written_steps`, `experts_only` | `parts/experts.py` |
| | `listed_experts`, `written_listed_experts`, `shared_experts`, `shared_count` | `parts/experts.py` |
| | `deepseek_keys`, `deepseek_experts`, `written_deepseek_experts` | `parts/experts.py` |
| a table with latent attention | `with_latents` | `families/deepseek.py` |
| its `keys`, and other fields | `latent_keys`, `OWN` | `families/deepseek.py` |
| `keys`, norms | `RMS`, `RMS_5`, `EPS`, `EPSILON` | `parts/defaults.py` |
| `keys`, biases | `BIASES`, `QKV_BIAS`, `MLP_BIAS` | `parts/defaults.py` |
| `read` and `write` | `one_bias`, `has_qk_layernorm`, `NotSupported` | `parts/defaults.py` |
| `names`, `harmless` of GPT-2 | `GPT_NAMES`, `SUMMARY` | `parts/defaults.py` |
| `windows` | `every`, `ALL_LAYERS`, `NO_LAYERS`, `LISTED`, `FROM_LAYER`, `SWITCHED` | `parts/keys.py` |
| | `FROM_LAST`, `FIRST_OF_TWO`, `FIRST_WITHOUT`, `FIRST_OF_PERIOD` | `parts/keys.py` |
| | `PERIOD_OR_NONE`, `WITHOUT_ROTATION` | `parts/keys.py` |
| `rotating` | `ROPE_INTERVAL`, `WITH_WINDOW`, `WITH_WINDOW_IF_ANY`, `WITH_BASE`, `WITH_SECTION` | `parts/keys.py` |
"""

from megatron_coca.checkpoints.huggingface.families import (
    bigcode,
    bloom,
    cohere,
    deepseek,
    fairseq,
    gemma,
    glm,
    gpt,
    granite,
    llama,
    llama_like,
    mistral,
    mixtures,
    olmo,
    openai,
    phi,
    published_code,
    qwen,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.row_check import check_row

MAKERS = (
    *(bigcode, bloom, cohere, deepseek, fairseq, gemma, glm, gpt, granite, llama, llama_like, mistral, mixtures),
    *(olmo, openai, phi, qwen, published_code),
)
"""The modules that define families."""
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
_FILES: dict[str, str] = {}
for _maker in MAKERS:
    _ROWS |= _maker.FAMILIES
    _FILES |= dict.fromkeys(_maker.FAMILIES, f"families/{_maker.__name__.rpartition('.')[2]}.py")
FAMILIES: dict[str, Family] = {name: _ROWS[name] for name in dict.fromkeys((*ORDER, *_ROWS))}
"""`model_type` -> architecture."""


def row_name(kind: str) -> str:
    """Return the name of a family's row for messages."""
    return f"row {kind!r} of {_FILES.get(kind, 'families')}"


for _kind, _family in FAMILIES.items():
    check_row(row_name(_kind), _family)
