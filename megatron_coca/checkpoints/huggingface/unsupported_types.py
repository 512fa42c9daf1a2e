"""Architectures that are not supported, each with the reason."""

EXPERTS = "it has mixture-of-experts layers, and no row describes its router and experts"
INDEXED = "in its attention, another network chooses the keys that a query sees"
RECURRENT = "it has recurrent or state-space layers, and only attention layers are supported"
CONVOLUTIONS = "it has convolution layers, and only attention layers are supported"
IMAGES = "it is a vision-language model without a supported text network"
AUDIO = "it is a model of audio, and only models of text are supported"
DECODER = "its decoder reads the output of an encoder, and only decoders without an encoder are supported"
DRAFTS = "it drafts tokens from the keys and values of another model"
MASKED = "it is an encoder like BERT: its attention is causal only if is_decoder is set"

_GROUPS = {
    EXPERTS: ("inkling2_text", "inkling_text", "zaya"),
    INDEXED: ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text"),
    RECURRENT: (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear"),
        *("mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba"),
        "zamba2",
    ),
    CONVOLUTIONS: ("lfm2", "lfm2_moe", "lfm3"),
    IMAGES: ("gemma3n", "git"),
    AUDIO: ("moshi", "musicgen", "musicgen_melody"),
    DECODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        *("prophetnet", "trocr", "whisper"),
    ),
    DRAFTS: ("gemma4_assistant", "gemma4_unified_assistant"),
    MASKED: (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        "xmod",
    ),
}
UNSUPPORTED_TYPES = {name: reason for reason, names in _GROUPS.items() for name in names} | {
    "axk1": "its experts are followed by a norm of their own",
    "beam": "it scales each residual sum by the depth of the layer",
    "bitnet": "its weights are ternary, and it has norms inside attention and MLP",
    "blt": "it reads patches of bytes, for which another network predicts the boundaries",
    "cohere2_moe": "it averages its shared experts with the others, and some of its layers rotate without a window",
    "cpmant": "its relative positions depend on segments of the prompt, and its attention is partly bidirectional",
    "dbrx": "its attention and experts have configurations of their own, and no row describes their keys",
    "deepseek_v4": "its layers attend to compressed keys, and it has several residual streams",
    "diffllama": "its attention is the difference of two softmaxes",
    "doge": "its attention drops keys by a learned score",
    "gemma3n_text": "it has an input for each layer and several residual streams",
    "gpt_neox_japanese": "of all its projections, only the output projection of the last layer's attention has a bias",
    "hrm_text": "it applies its layers several times to every token",
    "jetmoe": "its attention is a mixture of experts, too",
    "kolibri1": "its router adds its correction to the logits instead of the scores",
    "laguna": "the number of heads differs between its layers, and softplus gates multiply their outputs",
    "longcat_flash": "its layers have two attentions and two MLPs each, and some of its experts return their input",
    "mimo_v2_flash": "its values are narrower than its keys, and a factor multiplies them",
    "minimax": "most of its layers have linear attention",
    "phi3small": "its attention skips blocks of keys in most layers",
    "phimoe": "its router weighs experts by SparseMixer, a softmax over the experts with nearly the best score",
    "reformer": "its attention is limited to tokens with equal hashes",
    "xlm": "its attention is causal only if causal is set, and it adds embeddings of languages",
    "xlnet": "it predicts tokens in permuted orders, with two streams of attention",
}
"""`model_type` -> the reason, which completes a message."""
