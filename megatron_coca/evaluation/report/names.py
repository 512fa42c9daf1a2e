"""Short explanations of position methods, for readers of a report who do not know the names of its labels."""

from collections.abc import Iterable

from megatron_coca.evaluation.labels import in_sentence
from megatron_coca.evaluation.report.plots.looks import Member

MEANINGS: dict[str, dict[str, str]] = {
    "pos_emb": {
        "rotary": "RoPE, which rotates queries and keys by their positions",
        "coca": "collinear constrained attention with the constraint on keys, the form that the CoCA paper trains",
        "coca_strict": "collinear constrained attention with the constraint on keys and queries",
        "pope": "content determines only magnitudes, and positions determine only angles",
        "polar": "a form between CoCA-Strict and PoPE: content determines magnitudes, positions determine angles",
        "xpos": "RoPE with magnitudes that decay with the distance",
        "alibi": "no rotation; scores fall linearly with the distance",
        "kerple_log": "no rotation; scores fall with the logarithm of the distance, at a learned rate",
        "kerple_power": "no rotation; scores fall with a learned power of the distance",
        "sandwich": "no rotation; scores fall with the distance like products of sinusoidal embeddings",
        "fire": "no rotation; a small network turns the relative distance into a bias on scores",
        "rpe": "no rotation; T5's learned bias for each range of distances",
        "learned": "a learned vector for each position",
        "sinusoidal": "sines and cosines of the position, added to the embeddings",
        "none": "no position information except the causal mask",
    },
    "rotary_frequencies": {"rope_id": "frequencies that all turn at least twice within the training length"},
    "rope_scaling": {
        "linear": "positions are divided by a factor",
        "ntk": "a larger rotary base slows the slow frequencies most",
        "ntk_fixed": "a larger rotary base, also for the fastest frequency",
        "ntk_mixed": "a mixture of a larger rotary base and divided positions",
        "dynamic": "a rotary base that grows with the length of the input; a number in the name is the factor",
        "dynamic_max": "a rotary base that grows with the length of the input, at least that of the target length",
        "yarn": "slow frequencies are divided by a factor, the number in the name, and fast ones stay",
        "dynamic_yarn": "slow frequencies are divided by a factor that grows with the length of the input",
        "longrope": "every frequency is divided by a factor of its own",
        "llama3": "slow frequencies are divided by a factor, as in Llama 3.1",
        "proportional": "only the fastest frequencies rotate",
        "clex": "a learned differential equation changes the frequencies with the length",
    },
    "relative_positions": {
        "rerope": "all distances beyond a window count as the window",
        "leaky_rerope": "distances beyond a window grow more slowly",
        "inv_leaky_rerope": "trained with stretched distances beyond a window, evaluated without",
        "self_extend": "distances beyond a window count in groups of tokens",
        "string": "far tokens get distances that are frequent in training",
        "dual_chunk": "positions start again in every chunk of the input",
        "lm_infinite": "tokens beyond a window are hidden, except the first ones",
        "streaming": "tokens beyond a window are hidden, except the first ones, and positions count within the cache",
    },
    "logit_scaling": {
        "log_n": "scores grow with the logarithm of the position beyond the training length",
        "log_n_trained": "scores grow with the logarithm of the position, also in training",
        "ssmax": "scores grow with the logarithm of the position, at learned rates",
        "temperature": "scores grow slowly with the position",
    },
    "forgetting_gate": {
        "fox": "learned gates lower the scores of earlier tokens",
        "cable": "learned gates lower the scores of earlier tokens",
    },
}
"""By key and name of the configuration."""
AS_TRAINED = ("as trained", "no change at evaluation")


def explained(members: Iterable[Member], sentence: str = "") -> tuple[tuple[str, str], ...]:
    """Return the names of models and variants with an explanation of their methods, each explanation once.

    An explanation has the first name with these methods, and all other such names that `sentence` contains.
    """
    found: dict[str, list[str]] = {}
    changed = False
    for member in sorted(members, key=lambda member: bool(member.variant)):
        meanings = [MEANINGS[key].get(name, "") for key, name in member.methods]
        if meanings and all(meanings):
            name, names = member.variant or member.base, found.setdefault("; ".join(meanings), [])
            if not names or (name not in names and in_sentence(member.label) in sentence):
                names.append(name)
        changed = changed or bool(member.variant)
    listed = ((" and ".join(map(in_sentence, names)), meaning) for meaning, names in found.items())
    return tuple(listed) + ((AS_TRAINED,) if changed else ())
