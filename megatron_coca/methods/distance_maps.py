"""Values of `relative_positions.type`: the scores of distant pairs use a different distance."""

from functools import cache

from megatron_coca.methods.declaration import DistanceMap, Option, Use, Values, declare


@cache
def _window(divisor: int) -> Option:
    shown = "L" if divisor == 1 else f"L/{divisor}"
    return Option(
        "window",
        "count",
        "Distances below the window are unchanged.",
        by_length=lambda length, _: max(length // divisor, 1),
        shown=shown,
    )


def _sinks(default: int) -> Option:
    return Option("sinks", "whole", "Number of initial tokens that every query attends to.", default=default)


def _after_sinks(length: int, options: Values) -> int | None:
    return length - options["sinks"] if options["sinks"] < length else None


def _room_for_window(use: Use) -> str | None:
    full, sinks = use.options["window"] is None, use.options["sinks"]
    return f"{sinks} sinks leave no window within the training length {use.seq_length}; set window" if full else None


def _beyond_half(use: Use) -> str | None:
    target, length = use.options["target_length"], use.seq_length
    if 2 * target > length:
        return None
    return f"target_length {target} must exceed {length // 2}, half of the training length; raise it"


def _within_reach(use: Use) -> str | None:
    size, furthest = use.options["chunk_size"], use.options["max_position"]
    if size <= furthest:
        return None
    return (
        f"chunk_size {size} exceeds max_position {furthest}, so keys of the previous chunk would come after the query;"
        " lower chunk_size"
    )


def _shifted_back(use: Use) -> str | None:
    window, local = use.options["window"], use.options["local"]
    return None if local <= window else f"local {local} exceeds window {window}, so distances would grow; lower local"


_TARGET = Option("target_length", "count", "Largest evaluation length L'.", required=True)

declare(
    (
        DistanceMap(
            "rerope",
            "ReRoPE",
            "Su 2023",
            meaning="all distances beyond a window count as the window",
            rule="`m' = w`, `n' = 0`: all pairs at distance `w`",
            options=(_window(2),),
        ),
        DistanceMap(
            "leaky_rerope",
            "Leaky ReRoPE",
            "Su 2023",
            meaning="distances beyond a window grow more slowly",
            rule="`m' = (m + w(k-1))/k`, `n' = n/k`: distance `(r-w)/k + w`",
            options=(
                _window(2),
                Option("leak", "positive", "k; distances beyond the window grow by 1/k per token.", default=16.0),
            ),
        ),
        DistanceMap(
            "inv_leaky_rerope",
            "InvLeaky ReRoPE",
            "Su 2023",
            meaning="trained with stretched distances beyond a window, evaluated without",
            rule="the same with `k = L/(2L')` in training; plain rotation in evaluation",
            options=(_window(4), _TARGET),
            trained=True,
            training_only=True,
            checks=(_beyond_half,),
        ),
        DistanceMap(
            "self_extend",
            "SelfExtend",
            "Jin et al. 2024",
            meaning="distances beyond a window count in groups of tokens",
            rule="`m' = floor(m/G) + w - floor(w/G)`, `n' = floor(n/G)`",
            options=(
                _window(4),
                Option("group_size", "count", "Number G of positions in a group beyond the window.", default=8),
            ),
        ),
        DistanceMap(
            "string",
            "STRING",
            "An et al. 2024",
            meaning="far tokens get distances that are frequent in training",
            rule="`m' = m - w + local`, `n' = n`: distance `r - w + local`",
            options=(
                _window(3),
                Option(
                    "local",
                    "count",
                    "New distance of pairs at distance w. Larger distances shift by the same amount.",
                    by_length=lambda _, given: min(128, max(given["window"] // 2, 1)),
                    shown="at most 128",
                ),
            ),
            checks=(_shifted_back,),
        ),
        DistanceMap(
            "dual_chunk",
            "dual chunk attention",
            "An et al. 2024",
            meaning="positions start again in every chunk of the input",
            rule="`n' = n mod c`; `m' = m mod c` in the same chunk of c tokens, `min(m mod c + c, C)` for the chunk"
            " before, `min(2c - 1, C)` for older ones",
            options=(
                Option(
                    "chunk_size",
                    "count",
                    "Number of tokens c in a chunk.",
                    by_length=lambda length, _: max(3 * length // 4, 1),
                    shown="3L/4",
                ),
                Option(
                    "max_position",
                    "count",
                    "Largest position C of a query.",
                    by_length=lambda length, _: max(length - 1, 1),
                    shown="L - 1",
                ),
            ),
            counts_tokens=True,
            checks=(_within_reach,),
            neox="the plugin has not been tested with chunks",
        ),
        DistanceMap(
            "lm_infinite",
            "LM-Infinite",
            "Han et al. 2023",
            meaning="tokens beyond a window are hidden, except the first ones",
            rule="only the first `sinks` keys, at distance `w`",
            options=(_window(1), _sinks(10)),
        ),
        DistanceMap(
            "streaming",
            "StreamingLLM",
            "Xiao et al. 2023",
            meaning="tokens beyond a window are hidden, except the first ones, and positions count within the cache",
            rule="only the first `sinks` keys; positions are indices in a cache of the sinks and the last `w` keys",
            options=(
                Option(
                    "window",
                    "count",
                    "Distances below the window are unchanged.",
                    by_length=_after_sinks,
                    shown="L - sinks",
                ),
                _sinks(4),
            ),
            shifts_positions=True,
            counts_tokens=True,
            checks=(_room_for_window,),
        ),
    )
)
