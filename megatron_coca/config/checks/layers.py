"""Position keys of every layer type, for the checks."""

from megatron_coca.config.model import GLOBAL
from megatron_coca.config.position import PositionConfig
from megatron_coca.config.schema import Settings


def types_of(settings: Settings) -> dict[str, PositionConfig]:
    """Return the position keys of every layer type, or only the model's own if `attention_config` is not valid."""
    try:
        return settings.position.of_types(settings.model.layer_names)
    except ValueError:
        return settings.position.of_types([GLOBAL])
