"""Families with mixtures of experts that no other module describes.

Each family is a row of `FAMILIES` (see `keys.Family`).
"""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.llama import COLUMNS, GATES_FIRST
from megatron_coca.checkpoints.huggingface.families.llama_like import (
    AFTER,
    HUNYUAN_NORMS,
    hunyuan_base,
    hunyuan_section,
)
from megatron_coca.checkpoints.huggingface.families.mistral import MIXTRAL
from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    BIASES,
    MODERN,
    QKV_BIAS,
    RMS,
    RMS_5,
    Json,
    NotSupported,
)
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    DEEPSEEK_3,
    ROUTER_LOSS,
    ExpertNames,
    at_least_two,
    counted_experts,
    deepseek_experts,
    deepseek_keys,
    expert_layers,
    experts_only,
    listed_experts,
    shared_count,
    shared_experts,
    sparse_steps,
    with_experts,
    written_deepseek_experts,
    written_listed_experts,
    written_steps,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import (
    FROM_LAST,
    NO_LAYERS,
    WITH_WINDOW,
    Family,
    Windows,
    every,
)
from megatron_coca.checkpoints.huggingface.weight_map import (
    NEIGHBOURS,
    PRE,
    QK_HEAD,
    QK_PROJECTION,
    SINGLE,
    Row,
    WeightPacking,
    layer_rows,
    like_llama,
)
from megatron_coca.config import Config
from megatron_coca.config.model import EXPERTS

NORMALIZED: dict[str, Any] = {**DEEPSEEK_3, "moe_norm_topk_prob": True}
"""Our keys for the router of DeepSeek 3 in classes that always normalize its weights and have no key for this."""
FURTHER = frozenset({"output_router_logits", "num_nextn_predict_layers", "num_mtp_layers"})


# Afmoe ----------------------------------------------------------------------------------------------------------------

AFMOE_NORMS = {
    "input_layernorm": "input_layernorm",
    "attention_output_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp_output_layernorm": "post_mlp_layernorm",
}
AFMOE = with_experts(
    (
        *like_llama(AFMOE_NORMS | QK_HEAD),
        *layer_rows("model.layers.{i}", {"attention.output_gate": ("self_attn.gate_proj", SINGLE)}),
    ),
    ExpertNames(router="router.gate", correction="expert_bias", shared="shared_experts"),
)


def _afmoe(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_experts", 64)
    layers, dense = config["num_hidden_layers"], config.get("num_dense_layers", 1)
    if dense >= layers:
        raise NotSupported(f"num_dense_layers: {dense} leaves no layer with experts")
    if config.get("sliding_window", 1024) is None:
        raise NotSupported("sliding_window: null is not supported, only a number of tokens")
    scale = {"embedding_scale": config["hidden_size"] ** 0.5} if config.get("mup_enabled", False) else {}
    beside = shared_experts(config, 2, 1408, "num_shared_experts")
    return NORMALIZED | beside | scale | expert_layers([number >= dense for number in range(layers)])


def _written_afmoe(config: Config) -> dict[str, Any]:
    experts = written_deepseek_experts(config, "num_shared_experts", "num_dense_layers")
    return experts | {"mup_enabled": config.model.embedding_scale != 1.0}


# Aria -----------------------------------------------------------------------------------------------------------------

ARIA = with_experts(
    like_llama(PRE),
    ExpertNames(
        router="router",
        whole=(("experts.fc1.weight", GATES_FIRST), ("experts.fc2.weight", COLUMNS)),
        shared="shared_experts",
    ),
)


def _aria(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "moe_num_experts", 8)
    beside = config.get("moe_num_shared_experts", 2) * config["intermediate_size"]
    return {"moe_norm_topk_prob": True, "moe_shared_intermediate_size": beside}


def _written_aria(config: Config) -> dict[str, Any]:
    beside = shared_count(config.model)
    return experts_only(config) | {"moe_num_shared_experts": beside}


# ERNIE 4.5 ------------------------------------------------------------------------------------------------------------

ONE_ROW = WeightPacking(lambda parts, heads: parts[0].flatten(), lambda packed, heads, count: [packed[None]])
"""Packing of a vector that the class stores as a matrix with one row."""


def _ernie(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "moe_num_experts", 64)
    layers, interval = config["num_hidden_layers"], config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    chosen = range(first, (layers - 1 if last == -1 else last) + 1)
    mixed = [number in chosen and (number + 1) % interval == 0 for number in range(layers)]
    if not any(mixed):
        raise NotSupported(
            "moe_layer_start_index, moe_layer_end_index, moe_layer_interval: leave no layer with experts"
        )
    beside = config.get("moe_num_shared_experts", 2) * config.get("moe_intermediate_size", 1536)
    router = {"moe_correction_bias": True, "moe_norm_topk_prob": True}
    return router | {"moe_shared_intermediate_size": beside or None} | expert_layers(mixed)


def _written_ernie(config: Config) -> dict[str, Any]:
    """Return the keys that `_ernie` reads. If they cannot describe the model's layers, the export differs from the
    model when it is read back.
    """
    model = config.model
    mixed = [number for number, kind in enumerate(model.mlp_names) if kind == EXPERTS] or [0]
    gap = mixed[1] - mixed[0] if len(mixed) > 1 else 1
    return {
        "moe_intermediate_size": model.expert_width,
        "moe_num_shared_experts": shared_count(model),
        "moe_layer_start_index": mixed[0],
        "moe_layer_end_index": mixed[-1],
        "moe_layer_interval": gap,
    }


# Flint ----------------------------------------------------------------------------------------------------------------

FLINT = with_experts(
    (
        *like_llama(PRE | QK_HEAD),
        Row("blocks.{i}.attention.position_sinks.weight", ("model.layers.{i}.self_attn.softmax_offset",)),
    ),
    ExpertNames(shared="shared_expert"),
)


def _flint_windows(config: Json, count: int) -> list[bool]:
    """Read which layers have the window. By default, the first two, every fourth and the last layer do not have it."""
    if config.get("layer_types") is not None:
        return NO_LAYERS.read(config, count)
    return [i >= 2 and i % 4 != 1 and i != count - 1 for i in range(count)]


def _flint(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_experts", 256)
    listed, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    steps = {"mlp_only_layers": [0, 1] if listed is None else listed, "decoder_sparse_step": step}
    return sparse_steps(steps | {"num_hidden_layers": config["num_hidden_layers"]}, keys)


# Hunyuan --------------------------------------------------------------------------------------------------------------


def _of_all_layers(config: Json, name: str, default: int) -> int:
    """Return a number that config.json may list for each layer. Raises NotSupported if layers differ."""
    found = config.get(name, default)
    values = set(found) if isinstance(found, list) else {found}
    if len(values) != 1:
        raise NotSupported(f"{name}: differs between layers, which is not supported")
    return int(values.pop())


def _hunyuan_moe(config: Json, keys: Json) -> dict[str, Any]:
    experts = _of_all_layers(config, "num_local_experts" if "num_local_experts" in config else "num_experts", 1)
    at_least_two({"num_experts": experts}, "num_experts", None)
    return hunyuan_base(config, keys) | {
        "moe_num_experts": experts,
        "moe_top_k": _of_all_layers(
            config, "num_experts_per_tok" if "num_experts_per_tok" in config else "moe_topk", 1
        ),
        "moe_norm_topk_prob": True,
        "moe_shared_intermediate_size": config["intermediate_size"],
    }


def _written_hunyuan_moe(config: Config) -> dict[str, Any]:
    model = config.model
    return experts_only(config) | {"num_experts": model.moe_num_experts, "moe_topk": model.moe_top_k}


def _hunyuan_3(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_experts", 192)
    return NORMALIZED | shared_experts(config, 1, 1536, "num_shared_experts") | listed_experts(config, 1)


# MiniMax, K-EXAONE, Solar ---------------------------------------------------------------------------------------------


def _minimax(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_local_experts", 256)
    rotated, section = config.get("rotary_dim"), config.get("rope_parameters") or {}
    told = section.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return {} if rotated is None or told else {"rotary_pct": rotated / config.get("head_dim", 128)}


def _exaone(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_experts", 64)
    beside = shared_experts(config, 1, 1024, "num_shared_experts")
    return dict(DEEPSEEK_3) | beside | listed_experts(config, config.get("first_k_dense_replace", 1))


def _solar(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "n_routed_experts", 128)
    return dict(DEEPSEEK_3) | shared_experts(config, 1, 1280)


def _written_solar(config: Config) -> dict[str, Any]:
    model = config.model
    beside = shared_count(model)
    return {"moe_intermediate_size": model.expert_width, "n_shared_experts": beside}


def _counted(
    experts: int, top_k: int, width: int | None = None, name: str = "num_experts"
) -> dict[str, tuple[str, Any]]:
    """Return the keys for the number of experts, their number per token, and their width if it has its own key."""
    keys = {name: ("moe_num_experts", experts), "num_experts_per_tok": ("moe_top_k", top_k)}
    return keys if width is None else keys | {"moe_intermediate_size": ("moe_intermediate_size", width)}


_EXAONE = {name: key for name, key in deepseek_keys(64, 8, True).items() if name != "n_routed_experts"}

FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        "AfmoeForCausalLM",
        AFMOE,
        MODERN | {"norm_position": "sandwich", "qk_norm": "head", "attention_output_gate": "feature"},
        RMS_5 | _counted(64, 6, 1408) | {"route_scale": ("moe_routed_scaling_factor", 1.0)},
        {"attention_bias": False},
        head_dim=128,
        windows=every(4, "global_attn_every_n_layers"),
        window=1024,
        rotating=WITH_WINDOW,
        in_older=False,
        read=_afmoe,
        write=_written_afmoe,
        harmless=frozenset({"output_router_logits", "n_group"}),
    ),
    "aria_text": Family(
        "AriaTextForCausalLM",
        ARIA,
        MODERN,
        RMS | BIASES | {"moe_num_experts": ("moe_num_experts", 8), "moe_topk": ("moe_top_k", 2)},
        {"mlp_bias": False, "hidden_act": "silu"},  # its experts always use this activation
        activation=(None, "silu"),
        read=_aria,
        write=_written_aria,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        with_experts(like_llama(PRE | QK_HEAD), ExpertNames(shared="shared_experts")),
        MODERN | {"qk_norm": "head"},
        RMS | BIASES | deepseek_keys(None, None, False),
        windows=FROM_LAST,
        window=4096,
        read=lambda config, keys: deepseek_experts(config, None, None, 0),
        write=written_deepseek_experts,
        harmless=frozenset({"output_router_logits", "max_window_layers"}),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        with_experts(
            like_llama(PRE, NEIGHBOURS),
            ExpertNames(shared="shared_experts", correction="moe_statics.e_score_correction_bias", corrections=ONE_ROW),
        ),
        MODERN,
        RMS_5
        | {"moe_num_experts": ("moe_num_experts", 64), "moe_k": ("moe_top_k", 6)}
        | {"moe_intermediate_size": ("moe_intermediate_size", 1536)},
        {"use_bias": False, "moe_norm_min": 1e-12},
        {"attention_dropout": None},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        tied=True,
        rope=500000.0,
        read=_ernie,
        write=_written_ernie,
        harmless=ROUTER_LOSS | FURTHER,
        later_layers=True,
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        with_experts(
            like_llama(PRE | QK_HEAD), ExpertNames(shared="shared_experts", correction="e_score_correction_bias")
        ),
        MODERN | {"qk_norm": "head"},
        RMS_5 | _EXAONE | _counted(64, 8, 1024) | {"routed_scaling_factor": ("moe_routed_scaling_factor", 2.5)},
        windows=every(4, "sliding_window_pattern"),
        window=4096,
        rotating=WITH_WINDOW,
        in_older=False,
        read=_exaone,
        write=lambda config: written_listed_experts(config, "num_shared_experts"),
        harmless=FURTHER | {"first_k_dense_replace", "sliding_window_pattern"},
        later_layers=True,
    ),
    "flint": Family(
        "FlintForCausalLM",
        FLINT,
        MODERN | {"qk_norm": "head", "sink_logits": True, "moe_router_scores": "sigmoid"},
        RMS
        | BIASES
        | _counted(256, 6, 512)
        | {"norm_topk_prob": ("moe_norm_topk_prob", True)}
        | {"shared_expert_intermediate_size": ("moe_shared_intermediate_size", 1024)},
        head_dim=128,
        windows=Windows(_flint_windows),
        window=513,
        rotating=WITH_WINDOW,
        in_older=False,
        read=_flint,
        write=written_steps,
        harmless=ROUTER_LOSS,
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        with_experts(like_llama(PRE | HUNYUAN_NORMS), ExpertNames(router="gate.wg", shared="shared_mlp")),
        MODERN | AFTER,
        RMS_5 | BIASES,
        {"use_qk_norm": True, "use_cla": False},
        rope_section=hunyuan_section,
        read=_hunyuan_moe,
        write=_written_hunyuan_moe,
        harmless=frozenset({"output_router_logits", "eod_token_id"}),
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        with_experts(
            like_llama(PRE | QK_HEAD),
            ExpertNames(router="router.gate", correction="expert_bias", shared="shared_mlp"),
        ),
        MODERN | {"qk_norm": "head"},
        RMS_5 | BIASES | _counted(192, 8, 1536) | {"router_scaling_factor": ("moe_routed_scaling_factor", 2.826)},
        {"mlp_bias": False},
        head_dim=128,
        rope=11158840.0,
        in_older=False,
        read=_hunyuan_3,
        write=lambda config: written_listed_experts(config, "num_shared_experts"),
        harmless=FURTHER | {"enable_moe_fp32_combine"},
        later_layers=True,
    ),
    "mellum": Family(
        "MellumForCausalLM",
        with_experts(like_llama(PRE | QK_HEAD)),
        MODERN | {"qk_norm": "head"},
        RMS | BIASES | _counted(64, 8, 896, "num_local_experts") | {"norm_topk_prob": ("moe_norm_topk_prob", True)},
        first={"num_experts": "num_local_experts"},
        head_dim=128,
        rope=500000.0,
        windows=NO_LAYERS,
        window=1024,
        by_type=(None, 10000.0),
        in_older=False,
        read=counted_experts("num_local_experts", 64, layers=lambda config, keys: listed_experts(config, 0)),
        write=written_listed_experts,
        harmless=ROUTER_LOSS | FURTHER | {"mtp_layer_types", "mtp_mlp_layer_types"},
        later_layers=True,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        with_experts(
            like_llama(PRE | QK_PROJECTION),
            ExpertNames(MIXTRAL.mlp, parts=MIXTRAL.parts, correction="e_score_correction_bias"),
        ),
        MODERN | NORMALIZED | {"qk_norm": "projection"},
        RMS | _counted(256, 8, name="num_local_experts"),
        {"router_jitter_noise": 0.0},
        first={"num_experts": "num_local_experts"},
        head_dim=128,
        rope=5000000.0,
        share=1.0,
        in_older=False,
        read=_minimax,
        write=experts_only,
        harmless=ROUTER_LOSS,
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        with_experts(like_llama(PRE), ExpertNames(shared="shared_experts")),
        {**MODERN, **DEEPSEEK_3},
        RMS_5 | QKV_BIAS | deepseek_keys(128, 8, True, 1280),
        names={"intermediate_size": None},
        head_dim=128,
        rope=1000000.0,
        in_older=False,
        read=_solar,
        write=_written_solar,
        harmless=frozenset({"output_router_logits", "intermediate_size"}),
    ),
}
"""`model_type` -> family."""
