"""Checks of data paths, their weights and labels, packing, and synthetic tasks."""

from functools import partial

from megatron_coca.config.base import shown
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.data import SyntheticConfig, split_shares
from megatron_coca.config.schema import Settings

SETS = ("train", "valid", "test")


def _data_path(settings: Settings) -> str | None:
    data = settings.data
    lists = [name for name in SETS if getattr(data, f"{name}_data_paths")]
    both = data.data_path is not None and lists
    return f"contradicts {lists[0]}_data_paths; set only one of the two" if both else None


def _paths(name: str, settings: Settings) -> str | None:
    given = [other for other in SETS if other != name and getattr(settings.data, f"{other}_data_paths")]
    missing = getattr(settings.data, f"{name}_data_paths") is None and given
    return f"missing, but {given[0]}_data_paths is set; set all three or none" if missing else None


_FOR_EACH_PATH = {
    "{}_data_weights": ("weights", "give one for each"),
    "{}_label_data_paths": ("labels", "give one for each, or null"),
}
"""Keys with one entry per data path. Each has the name of its entries, and the remedy if their number is wrong."""


def _one_for_each(name: str, pattern: str, settings: Settings) -> str | None:
    given, paths = (getattr(settings.data, key.format(name)) for key in (pattern, "{}_data_paths"))
    entries, remedy = _FOR_EACH_PATH[pattern]
    unequal = given is not None and len(given) != len(paths or [])
    return f"{len(given)} {entries} for {len(paths or [])} {name}_data_paths; {remedy}" if unequal else None


def _split(settings: Settings) -> str | None:
    split = settings.data.split
    wrong = f"{shown(split)} is not a list of up to three numbers; write, for example, `969, 30, 1`"
    return None if split_shares(split) else wrong


def _pack_impl(settings: Settings) -> str | None:
    if settings.data.pack_impl == "packed" or not settings.logging.eval_windows:
        return None
    return "not supported with eval_windows, which needs samples without padding; set pack_impl=packed"


def _positions(settings: Settings) -> str | None:
    data, embedding = settings.data, settings.position.embedding
    if not data.reset_position_ids or data.reset_attention_mask or not embedding.by_distance:
        return None
    return f"not supported with pos_emb {embedding.name} and attention across documents; set reset_attention_mask=true"


def _updates(task: SyntheticConfig) -> str | None:
    if task.task != "ordered_recall":
        unused = [name for name in ("updates", "back") if getattr(task, name) is not None]
        return f"{unused[0]} has no effect with task {task.task}; remove it" if unused else None
    if task.updates is None:
        return "ordered_recall needs updates, the number of values of each key; set synthetic.updates"
    if task.back is not None and task.back > task.facts:
        return f"no question can ask {task.back} facts back with {task.facts} facts; lower synthetic.back"
    if task.facts % task.updates:
        return f"{task.facts} facts are no multiple of updates={task.updates}; change one of them"
    if task.facts // task.updates > task.keys:
        return (
            f"{task.facts // task.updates} different keys are needed, but there are {task.keys}; raise synthetic.keys"
        )
    if task.updates > task.values:
        return f"each key needs {task.updates} different values, but there are {task.values}; raise synthetic.values"
    return None


def _synthetic(settings: Settings) -> str | None:
    task, data = settings.data.synthetic, settings.data
    if task is None:
        return None
    if task.task in ("recall", "multi_query") and task.facts > task.keys:
        return f"{task.facts} facts need {task.facts} different keys, but synthetic.keys is {task.keys}; raise it"
    if problem := _updates(task):
        return problem
    if not task.text and (data.data_path is not None or data.train_data_paths is not None):
        return "does not read the data paths that are set; remove them, or set synthetic.text=true to mix in their text"
    packed = [name for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss") if getattr(data, name)]
    if data.pack_impl != "packed":
        return f"not supported with pack_impl {data.pack_impl}: the samples have no documents; set pack_impl=packed"
    if packed:
        return f"not supported with {packed[0]}: the samples have no documents; set {packed[0]}=false"
    if settings.logging.eval_windows:
        return "not supported with eval_windows, which reads documents; remove it, or use megatron-coca evaluate"
    return None


CHECKS = (
    Check("data_path", _data_path),
    *(Check(f"{name}_data_paths", partial(_paths, name)) for name in SETS),
    *(
        Check(pattern.format(name), partial(_one_for_each, name, pattern))
        for pattern in _FOR_EACH_PATH
        for name in SETS
    ),
    Check("pack_impl", _pack_impl),
    Check("split", _split),
    Check("reset_position_ids", _positions),
    Check("synthetic", _synthetic),
)
