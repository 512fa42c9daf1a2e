"""The model: shapes, residual forms, norms, activations, causality, dropout, recomputation."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca import methods
from megatron_coca.config import load_config
from megatron_coca.config.model import Activation, Norm
from megatron_coca.model import GPT, LanguageModelLoss, build_model, layers, next_token_loss
from megatron_coca.model.layers import GATED, LEARNED, NORMS, UNGATED

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 90}
LENGTH = 12


def make(**keys: Any) -> GPT:
    return build_model(load_config([], SHAPE | {"make_vocab_size_divisible_by": 16, "pos_emb": "rotary"} | keys))


def tokens(length: int = LENGTH, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(90, (batch, length), generator=torch.Generator().manual_seed(seed))


def shake(model: GPT, seed: int = 3) -> GPT:
    """Give every parameter, biases and norms included, a random part, so that none of them can be left out
    unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("untied", [False, True])
def test_logits_cover_the_padded_vocabulary(untied: bool) -> None:
    model = make(no_weight_tying=untied).eval()
    logits = model(tokens())
    assert logits.shape == (2, LENGTH, 96) and logits.dtype == torch.float32
    assert (model.final_linear is not None) == untied
    head = model.final_linear.weight if untied else model.embedding.word_embeddings.weight
    torch.testing.assert_close(logits, model.hidden_states(tokens()) @ head.T)


def test_a_tied_head_trains_the_embedding() -> None:
    model = make(no_weight_tying=False)
    LanguageModelLoss(model)(tokens()).backward()
    rows = model.embedding.word_embeddings.weight.grad.abs().sum(dim=1)
    assert (rows > 0).all(), "through the head every row gets a gradient, also of tokens not in the input"


def recomputed(model: GPT, ids: Tensor, parallel: bool, tied_norm: bool) -> Tensor:
    """The GPT-NeoX model without positions, written from its state dict."""
    w = model.state_dict()

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        )

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def attention(name: str, x: Tensor) -> Tensor:
        packed = linear(f"{name}.query_key_value", x).unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(
            torch.ones(len(ids[0]), len(ids[0])).triu(1).bool(), -torch.inf
        )
        return linear(f"{name}.dense", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    x = w["embedding.word_embeddings.weight"][ids]
    for name in ("blocks.0", "blocks.1"):
        first = norm(f"{name}.input_layernorm", x)
        attended = attention(f"{name}.attention", first)
        base = x if parallel else x + attended
        second = first if tied_norm else norm(f"{name}.post_attention_layernorm", base)
        fed = linear(f"{name}.mlp.linear2", F.gelu(linear(f"{name}.mlp.linear1", second)))
        x = x + attended + fed
    return norm("norm", x) @ w["embedding.word_embeddings.weight"].T


@pytest.mark.parametrize(("parallel", "tied_norm"), [(False, False), (True, False), (True, True)])
def test_blocks_match_their_formula(parallel: bool, tied_norm: bool) -> None:
    model = shake(make(pos_emb="none", gpt_j_residual=parallel, gpt_j_tied=tied_norm)).eval()
    torch.testing.assert_close(model(tokens()), recomputed(model, tokens(), parallel, tied_norm), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("parallel", "tied_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("last", [1, 5, 12])
def test_states_of_the_last_tokens_alone(parallel: bool, tied_norm: bool, last: int) -> None:
    model = shake(make(pos_emb="coca", gpt_j_residual=parallel, gpt_j_tied=tied_norm)).eval()
    whole = model.hidden_states(tokens())
    torch.testing.assert_close(model.hidden_states(tokens(), last=last), whole[:, -last:], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="only in evaluation"):
        model.train().hidden_states(tokens(), last=last)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward_in_parts(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(activation=activation).blocks[0].mlp, torch.randn(3, 7, 32)
    whole = layer(x)
    monkeypatch.setattr(layers, "TOKENS_AT_ONCE", 4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), whole, rtol=1e-5, atol=1e-6)


def test_tables_of_layers_hold_every_choice() -> None:
    assert set(get_args(Norm)) == NORMS.keys()
    assert set(get_args(Activation)) == UNGATED.keys() | GATED.keys() | LEARNED.keys()
    assert len({*UNGATED, *GATED, *LEARNED}) == len(UNGATED) + len(GATED) + len(LEARNED)


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_trains(norm: str) -> None:
    _check_trains(make(norm=norm))


@pytest.mark.parametrize("activation", [*UNGATED, *GATED, *LEARNED])
def test_every_activation_trains(activation: str) -> None:
    only_experts = {"moe_num_experts": 2} if activation == "clamped_swiglu" else {}
    model = make(activation=activation, **only_experts)
    assert model.blocks[0].mlp.linear1.weight.shape[-2] == (86 if activation in GATED else 128)
    _check_trains(model)


def _check_trains(model: GPT) -> None:
    loss = LanguageModelLoss(model)(tokens())
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0, (
            name
        )


def test_scalenorm_and_gated_order() -> None:
    norm = make(norm="scalenorm").norm
    x = torch.tensor([3.0, 4.0] + 30 * [0.0])
    torch.testing.assert_close(norm(x), x / 5)
    mlp = make(activation="swiglu", use_bias_in_mlp=False).blocks[0].mlp
    value, gate = (mlp.linear1.weight @ x).chunk(2)
    torch.testing.assert_close(mlp(x), mlp.linear2.weight @ (value * F.silu(gate)))


def test_gelu_fusion_is_the_tanh_approximation() -> None:
    x = torch.linspace(-3, 3, 32)
    exact, fused = (
        make(activation="gelu", bias_gelu_fusion=fusion).blocks[0].mlp.activation(x) for fusion in (False, True)
    )
    assert torch.equal(exact, F.gelu(x)) and torch.equal(fused, F.gelu(x, approximate="tanh"))
    assert 0 < float((exact - fused).abs().max()) < 1e-3


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("pos_emb", methods.names("pos_emb"))
@torch.no_grad()
def test_no_token_changes_what_comes_before_it(pos_emb: str, kv_heads: int) -> None:
    model = shake(make(pos_emb=pos_emb, num_kv_heads=kv_heads, rotary_pct=0.5)).eval()
    ids, changed = tokens(), tokens()
    before = model(ids)
    for t in (0, 5, LENGTH - 1):
        changed[:, t] = (ids[:, t] + 1) % 90
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
        assert ((after[:, t:] - before[:, t:]).abs().amax(dim=(0, 2)) > 1e-4).all(), "all later positions see it"
        changed[:, t] = ids[:, t]


@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "coca_strict"])
@torch.no_grad()
def test_given_positions_are_used(pos_emb: str) -> None:
    model = shake(make(pos_emb=pos_emb)).eval()
    plain = model(tokens())
    torch.testing.assert_close(model(tokens(), torch.arange(LENGTH)), plain)
    torch.testing.assert_close(model(tokens(), torch.arange(LENGTH).expand(2, -1)), plain)
    shifted = model(tokens(), torch.arange(LENGTH) + 5)
    assert torch.allclose(shifted, plain, atol=1e-4) == methods.find("pos_emb", pos_emb).shift_invariant
    stretched = model(tokens(), torch.arange(LENGTH) * 3)
    assert not torch.allclose(stretched, plain, atol=1e-3)
    rows = torch.stack((torch.arange(LENGTH), torch.arange(LENGTH) * 3))
    torch.testing.assert_close(model(tokens(), rows), torch.stack((plain[0], stretched[1])))


@torch.no_grad()
def test_learned_positions_end_with_their_table() -> None:
    model = shake(make(pos_emb="learned", max_position_embeddings=20)).eval()
    assert model(tokens(20)).shape[1] == 20
    assert not torch.allclose(model(tokens(8), torch.arange(8) + 12), model(tokens(8)), atol=1e-3)
    with pytest.raises(ValueError, match="position 20 is beyond the 20 learned positions"):
        model(tokens(21))
    with pytest.raises(ValueError, match="position 20 is beyond the 20 learned positions"):
        model(tokens(1), torch.tensor([20]))


@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "coca_strict", "alibi", "none"])
@torch.no_grad()
def test_lengths_beyond_training_are_ordinary(pos_emb: str) -> None:
    logits = make(pos_emb=pos_emb).eval()(tokens(16 * 4 + 1))
    assert logits.shape == (2, 65, 96) and torch.isfinite(logits).all()


@pytest.mark.parametrize("pos_emb", ["coca", "alibi"])
def test_recomputing_activations_changes_no_gradient(pos_emb: str) -> None:
    gradients = []
    for recompute in (False, True):
        model = make(pos_emb=pos_emb, checkpoint_activations=recompute, hidden_dropout=0.2, attention_dropout=0.2)
        torch.manual_seed(5)
        LanguageModelLoss(model)(tokens()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("keys", [{"hidden_dropout": 0.5}, {"attention_dropout": 0.5}])
@pytest.mark.parametrize("pos_emb", ["coca", "alibi"])
@torch.no_grad()
def test_dropout_acts_in_training_only(pos_emb: str, keys: dict[str, float]) -> None:
    model, plain = make(pos_emb=pos_emb, **keys), make(pos_emb=pos_emb)
    assert not torch.equal(model.train()(tokens()), model(tokens()))
    assert torch.equal(model.eval()(tokens()), plain.eval()(tokens()))


def test_loss_is_the_mean_over_tokens_in_float32() -> None:
    model = make().eval()
    samples = tokens(LENGTH + 1)
    logits = model(samples[:, :-1])
    expected = -logits.log_softmax(-1).gather(-1, samples[:, 1:, None]).mean()
    torch.testing.assert_close(LanguageModelLoss(model)(samples), expected)
    assert next_token_loss(logits.bfloat16(), samples[:, 1:]).dtype == torch.float32


@torch.no_grad()
def test_grouped_query_heads_read_their_group() -> None:
    """Two key heads for four queries equal four key heads in which each is written twice."""
    grouped, full = shake(make(num_kv_heads=2)).eval(), make(num_kv_heads=4).eval()
    state = grouped.state_dict()
    for name in [name for name in state if "query_key_value" in name]:
        q, k, v = (part.unflatten(0, (-1, 8)) for part in state[name].split((32, 16, 16)))
        k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
        state[name] = torch.stack((q, k, v), dim=1).flatten(0, 2)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens()), grouped(tokens()))
