"""From configuration to method: every declared choice has a formula, and every default is the documented one."""

from typing import Any

import pytest
import torch

from megatron_coca import methods
from megatron_coca.attention.build import build_method
from megatron_coca.attention.inputs import Band, documents_from_ids, positions_within
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.attention.positions.bias import BIASES
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, UNMAPPED
from megatron_coca.attention.positions.forms import PLAIN, SCORE_FORMS
from megatron_coca.attention.positions.frequencies import EXTENSIONS, MULTIPLIERS
from megatron_coca.attention.positions.logit_scalings import LOGIT_SCALINGS
from megatron_coca.config import ConfigError, load_config
from megatron_coca.config.position import ORIGINAL, read_choice
from megatron_coca.model.gpt import resolve_positions
from megatron_coca.model.layers import ABSOLUTE

TRAINED = 64


def make(**keys: Any) -> PositionMethod:
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": TRAINED}
    config = load_config([], shape | keys)
    return build_method(config.position, config.model)


def declared(key: str, **attributes: Any) -> set[str]:
    """Names of the package's own choices; other tests declare choices of their own."""
    return set(methods.names(key, compute=None, **attributes))


def test_every_choice_has_a_formula_and_every_formula_a_choice() -> None:
    rotary, biased, added = (
        declared("pos_emb", **which) for which in ({"rotary": True}, {"biased": True}, {"by_distance": False})
    )
    assert (SCORE_FORMS.keys(), BIASES.keys(), ABSOLUTE.keys()) == (rotary, biased, added)
    assert rotary | biased | added == declared("pos_emb") - {"none"}
    assert len(rotary) + len(biased) + len(added) + 1 == len(declared("pos_emb")), "one formula each"
    assert EXTENSIONS.keys() == declared("rope_scaling", learned=False)
    assert declared("rope_scaling", learned=True) == {"clex"} and MULTIPLIERS.keys() <= EXTENSIONS.keys()
    assert DISTANCE_MAPS.keys() == declared("relative_positions")
    assert LOGIT_SCALINGS.keys() == declared("logit_scaling") - {"none"}


@pytest.mark.parametrize("name", methods.names("pos_emb"))
def test_a_method_rotates_biases_and_decays_as_declared(name: str) -> None:
    method, embedding = make(pos_emb=name), methods.find("pos_emb", name)
    assert method.form.rotary == (method.rotary is not None) == embedding.rotary
    assert (method.form is PLAIN) == (not embedding.rotary)
    assert (method.bias.formula is not None) == embedding.biased
    by_layer = method.bias.by_layer is not None or method.offsets is not None
    assert by_layer == (embedding.weights == "layer")
    assert (method.bias.shared is not None) == (embedding.weights == "shared")


def test_learned_frequencies_are_those_of_the_declared_extension() -> None:
    learned = make(pos_emb="rotary", rope_scaling={"rope_type": "clex"}).clex
    assert learned is not None and isinstance(learned(), Clex)
    assert make(pos_emb="rotary", rope_scaling={"rope_type": "ntk", "factor": 2.0}).clex is None


REQUIRED = {"factor": 2.0, "target_length": 256, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "proportion": 0.5}
CHOICES = [(key, name) for key in ("rope_scaling", "relative_positions") for name in methods.names(key)]


@pytest.mark.parametrize(("key", "name"), CHOICES)
def test_every_option_belongs_to_a_choice(key: str, name: str) -> None:
    """A choice has its own options and no others, and needs the required ones."""
    choice, others = methods.find(key, name), [methods.find(key, other) for other in methods.names(key)]
    own = {option.name for option in choice.options}
    extra = {ORIGINAL} if key == "rope_scaling" else set()
    assert type(read_choice(key, {choice.selector: name})).model_fields.keys() == own | extra | {choice.selector}
    required = {option.name: REQUIRED[option.name] for option in choice.options if option.required}
    make(pos_emb="rotary", **{key: {choice.selector: name} | required})
    for option in required:
        with pytest.raises(ConfigError, match=f"{choice.selector} {name} needs {option}"):
            make(pos_emb="rotary", **{key: {choice.selector: name} | required | {option: None}})
    foreign = {option.name: option for other in others for option in other.options if option.name not in own}
    for option, declaration in foreign.items():
        other = REQUIRED.get(option) or {"flag": not declaration.default, "choice": "rotations"}.get(
            declaration.kind, 3
        )
        with pytest.raises(ConfigError, match=f"{option} has no effect with {choice.selector} {name}"):
            make(pos_emb="rotary", **{key: {choice.selector: name} | required | {option: other}})


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
        ({"type": "dual_chunk"}, (Band(0, 1, chunk=48), Band(1, 2, chunk=48), Band(2, chunk=48))),
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
    with pytest.raises(ValueError, match="xpos overflows "):
        encoding(torch.arange(2 * reach), 2 * reach, dtype)


def test_chunks_keep_xpos_in_its_range() -> None:
    """Positions end at that of training, whatever the length; with chunks beyond the range it is an error."""
    encoding = PositionEncoding(make(pos_emb="xpos", relative_positions={"type": "dual_chunk"}))
    context = encoding(torch.arange(20000), 20000, torch.float16)
    assert all(tables.query.cos.abs().max() < 2 and tables.key.cos.abs().max() < 2 for tables in context.segments)
    wide = {"type": "dual_chunk", "chunk_size": 15000, "max_position": 20000}
    with pytest.raises(ValueError, match="xpos overflows "):
        PositionEncoding(make(pos_emb="xpos", relative_positions=wide))(torch.arange(20000), 20000, torch.float16)
