"""Declarations of all position methods. Imports no PyTorch.

Each choice is declared once. Its formula is the table entry of the same name in `megatron_coca.attention.positions`.
"""

from megatron_coca.methods import (  # declare the choices
    distance_maps,
    embeddings,
    forgetting_gates,
    frequency_extensions,
    logit_scalings,
    training_frequencies,
)
from megatron_coca.methods.declaration import (
    TABLES,
    Choice,
    DistanceMap,
    ForgettingGate,
    FrequencyExtension,
    LogitScaling,
    Option,
    PositionEmbedding,
    StockRope,
    TrainingFrequencies,
    Use,
    declare,
    find,
    names,
)
from megatron_coca.methods.user_methods import MARK, ImportedFileError, import_file, register
