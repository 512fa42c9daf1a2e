"""The model that a run begins with: drawn, or with the weights that `load` names."""

import logging

from megatron_coca.checkpoints import Opened, open_checkpoint
from megatron_coca.checkpoints.compare import POSITION_WEIGHTS, differing_keys, refuse_other_architecture
from megatron_coca.checkpoints.load import load_weights
from megatron_coca.config import KEYS, Config
from megatron_coca.model import GPT, assemble_model, draw_learned_positions, empty_model

logger = logging.getLogger(__name__)

NOT_POSITION = frozenset(key for key, place in KEYS.items() if place.group != "position" and key != "seq_length")


def initial_model(config: Config, device: str) -> GPT:
    """A model for `device` with its weights in the memory of the host. Every rank has the same.

    With `finetune` they are those that `load` names, whose position method may be another: what only that one had is
    left out, and what the new one learns is drawn.

    Raises:
        CheckpointError: there is nothing to load, or the weights are not of this architecture.
    """
    keys = config.checkpoint
    if not keys.finetune or keys.load is None:
        return assemble_model(config, device)
    source = open_checkpoint(keys.load, step=keys.iteration)
    refuse_other_architecture(source.folder, source.trained, config)
    model = empty_model(config, device, memory="cpu")
    drawn = draw_learned_positions(model, config.seed)
    weights, own = source.weights(), model.state_dict()
    left_out = [name for name in weights.entries if name not in own and POSITION_WEIGHTS.fullmatch(name)]
    load_weights(model, weights.only(name for name in weights.entries if name not in left_out), drawn)
    logger.info(_told(source, config, left_out, [name for name in drawn if name not in weights.entries]))
    return model


def _told(source: Opened, config: Config, left_out: list[str], drawn: list[str]) -> str:
    changed = differing_keys(source.trained, config, NOT_POSITION)
    parts = [f"starts from the weights of {source.folder}"]
    parts += [f"with another {', '.join(changed)}"] if changed else []
    parts += [f"without {', '.join(left_out)}"] if left_out else []
    parts += [f"{', '.join(drawn)} drawn"] if drawn else []
    return "; ".join(parts)
