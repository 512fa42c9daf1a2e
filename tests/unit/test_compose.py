"""From configuration to method: the tables agree with the schema, and every default is the documented one."""

from typing import Any, get_args

import pytest
import torch

from megatron_coca.attention.build import BIASES, build_method
from megatron_coca.attention.inputs import Band, documents_from_ids, positions_within
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, UNMAPPED
from megatron_coca.attention.positions.forms import LOGIT_SCALINGS, SCORE_FORMS
from megatron_coca.attention.positions.frequencies import EXTENSIONS
from megatron_coca.config import load_config
from megatron_coca.config import model as keys
from megatron_coca.config.model import (
    BIASED_METHODS,
    MAP_OPTIONS,
    ROTATED_METHODS,
    SCALING_OPTIONS,
    MapType,
    PositionConfig,
    RelativePositions,
    RopeScaling,
    RopeType,
)
from megatron_coca.model.gpt import resolve_positions

TRAINED = 64


def make(**keys: Any) -> PositionMethod:
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": TRAINED}
    config = load_config([], shape | keys)
    return build_method(config.position, config.model)


def test_schema_and_tables_name_the_same_choices() -> None:
    assert set(get_args(keys.PositionMethod)) == SCORE_FORMS.keys()
    assert set(get_args(RopeType)) == EXTENSIONS.keys() | {"clex"} == SCALING_OPTIONS.keys()
    assert set(get_args(MapType)) == DISTANCE_MAPS.keys() == MAP_OPTIONS.keys()
    assert set(get_args(PositionConfig.model_fields["logit_scaling"].annotation)) == LOGIT_SCALINGS.keys()
    assert {name for name, form in SCORE_FORMS.items() if form.rotary} == ROTATED_METHODS
    assert BIASES.keys() == BIASED_METHODS


def test_every_option_belongs_to_a_choice() -> None:
    scaling = {name for names in SCALING_OPTIONS.values() for name in names}
    assert scaling | {"rope_type", "original_max_position_embeddings"} == RopeScaling.model_fields.keys()
    maps = {name for names in MAP_OPTIONS.values() for name in names}
    assert maps | {"type"} == RelativePositions.model_fields.keys()


@pytest.mark.parametrize(
    ("given", "bands"),
    [
        ({"type": "rerope"}, (Band(0, 32), Band(32))),
        ({"type": "leaky_rerope"}, (Band(0, 32), Band(32))),
        ({"type": "self_extend"}, (Band(0, 16), Band(16))),
        ({"type": "lm_infinite"}, (Band(0, 64), Band(64, None, 10))),
        ({"type": "lm_infinite", "sinks": 2, "window": 7}, (Band(0, 7), Band(7, None, 2))),
        ({"type": "streaming"}, (Band(0, 60), Band(60, None, 4))),
        ({"type": "streaming", "sinks": 0}, (Band(0, 64),)),
    ],
)
def test_default_windows(given: dict[str, Any], bands: tuple[Band, ...]) -> None:
    assert make(pos_emb="rotary", relative_positions=given).needs("cpu", 0.0).bands == bands


def test_inv_leaky_rerope_is_a_map_of_training_alone() -> None:
    method = make(pos_emb="rotary", relative_positions={"type": "inv_leaky_rerope", "target_length": 256})
    assert method.bands == UNMAPPED
    near, far = method.trained_bands
    assert near.high == far.low == 16
    places = torch.tensor([0.0, 100.0], dtype=torch.float64)
    query, key = far.query_positions(places, places[:1]), far.key_positions(places, places[:1])
    # b = 256/64 = 4: a far step is worth 2b = 8, from w = 16 on
    torch.testing.assert_close(query[1] - key[0], torch.tensor((100 - 16) * 8 + 16.0, dtype=torch.float64))
    encoding = PositionEncoding(method)
    assert len(encoding.train()(torch.arange(8), 8, torch.float32).segments) == 2
    assert len(encoding.eval()(torch.arange(8), 8, torch.float32).segments) == 1


def test_only_the_frequencies_refer_to_the_original_length() -> None:
    """Logit scaling and maps refer to the length that the weights were trained at last."""
    method = make(
        pos_emb="rotary",
        logit_scaling="log_n",
        rope_scaling={"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32},
        relative_positions={"type": "rerope"},
    )
    assert method.rotary.original_length == 32 and method.training_length == TRAINED
    assert method.bands[1].low == TRAINED // 2
    factors = PositionEncoding(method).eval()(torch.arange(TRAINED + 1), TRAINED, torch.float32).query_factor[:, 0]
    assert factors[:TRAINED].eq(1).all() and factors[TRAINED] > 1
    clex = {"rope_type": "clex", "max_factor": 4, "original_max_position_embeddings": 32}
    learned = make(pos_emb="rotary", rope_scaling=clex).clex()
    assert [learned.factor_for(length) for length in (32, 33, 64)] == [1, 2, 2]


def test_tables_are_shared_where_queries_and_keys_stand_alike() -> None:
    segment = PositionEncoding(make(pos_emb="coca"))(torch.arange(8), 8, torch.float32).segments[0]
    assert segment.query is segment.key


@pytest.mark.parametrize("name", ["xpos", "rotary", "coca"])
def test_tables_stay_finite_at_32k(name: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    encoding = PositionEncoding(make(pos_emb=name, logit_scaling="log_n", rope_scaling=scaling))
    tables = encoding(torch.arange(32768), 32768, torch.float32).segments[0]
    for table in (*tables.query, *tables.key):
        assert torch.isfinite(table).all() and table.abs().max() > 0.1


def test_documents_from_ids() -> None:
    documents = documents_from_ids(torch.tensor([[5, 5, 5, 7, 7, 5], [1, 1, 1, 1, 1, 1]]))
    assert documents.spans == (((0, 3), (3, 5), (5, 6)), ((0, 6),))
    assert documents.starts.tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]
    assert positions_within(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_positions_and_documents_on_the_host_are_read_without_the_device() -> None:
    tokens = torch.empty(2, 6, dtype=torch.int64, device="meta")  # nothing can be read from it
    ids = torch.tensor([[5, 5, 5, 7, 7, 5], [1, 1, 1, 1, 1, 1]])
    positions, reached, packed = resolve_positions(tokens, None, ids)
    assert packed is not None and packed.starts.device == positions.device == tokens.device
    assert (reached, packed.spans) == (6, (((0, 3), (3, 5), (5, 6)), ((0, 6),)))
    positions, reached, _ = resolve_positions(tokens, 10 * ids, None)
    assert (positions.device, reached) == (tokens.device, 71)


@pytest.mark.parametrize(("dtype", "reach"), [(torch.float16, 5000), (torch.float32, 60000)])
def test_xpos_says_where_it_ends(dtype: torch.dtype, reach: int) -> None:
    encoding = PositionEncoding(make(pos_emb="xpos"))
    tables = encoding(torch.arange(reach), reach, dtype).segments[0]
    assert all(100 * float(table.abs().max()) < torch.finfo(dtype).max for table in (*tables.query, *tables.key))
    with pytest.raises(ValueError, match="xpos at .* tokens multiplies operands by more than"):
        encoding(torch.arange(2 * reach), 2 * reach, dtype)
