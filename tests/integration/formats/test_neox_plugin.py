"""The plugin in a real GPT-NeoX checkout on the CPU, if GPT_NEOX_HOME is set (benchmarks/neox.md)."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from megatron_coca.checkpoints import load_model, open_checkpoint
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.huggingface.tokenizer_files import tokenizer_files
from megatron_coca.config import ConfigError, load_config
from megatron_coca.data.tokenizers import Tokenizer, load_tokenizer
from megatron_coca.data.tokenizers.training import train_sentencepiece
from megatron_coca.model import GPT, build_model, empty_model
from tests.checkpoint_files import write_checkpoint
from tests.conftest import ROOT, Finished, clean_environment, command_line
from tests.neox import twin
from tests.neox.cases import CASES, DIVIDED
from tests.neox.checkout import IMPORTING, Checkout, Step, checkout, free_port, steps
from tests.tokenizer_files import train_bpe, train_unigram

__all__ = ["checkout"]

LENGTH, STEPS, BATCH, SAMPLES, VOCABULARY = 64, 20, 8, 176, 512

SHAPE: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": LENGTH},
    **{"max_position_embeddings": LENGTH, "vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 64},
    **{"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 4, "train_iters": STEPS, "warmup": 0.25},
    **{"precision": "fp32", "log_interval": 1, "checkpoint_factor": STEPS // 2, "eval_iters": 0},
}
"""What is scaled down of configs/350M/roformer_coca.yml; everything else in it stays."""

RUN: dict[str, Any] = {"tokenizer_type": "CharLevelTokenizer", "data_impl": "mmap", "distributed_backend": "gloo"}


def scaled(changes: Mapping[str, Any]) -> dict[str, Any]:
    """configs/350M/roformer_coca.yml for a small model, with changes."""
    keys = yaml.safe_load((ROOT / "configs/350M/roformer_coca.yml").read_text())
    return {name: value for name, value in (keys | SHAPE | dict(changes)).items() if name != "save"}


def paths(prefix: Path) -> dict[str, Any]:
    return {f"{split}_data_paths": [str(prefix)] for split in ("train", "valid", "test")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Samples of English text, byte by byte."""
    pages = b"".join((ROOT / "docs" / name).read_bytes() for name in ("attention.md", "config.md"))
    return twin.samples(np.frombuffer(pages, np.uint8).astype(np.int64), LENGTH, SAMPLES)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our checkpoint with weights as the configuration draws them."""
    torch.manual_seed(5)
    return write_checkpoint(tmp_path_factory.mktemp("initial") / "run", load_config([], scaled({})))


DIVISIONS: dict[str, dict[str, Any]] = {
    "as in the file": {},
    "one stage": {"pipe_parallel_size": 1, "zero_optimization": {"stage": 0}},
    "two stages": {"pipe_parallel_size": 2},
    "two tensor ranks": {"model_parallel_size": 2, "zero_optimization": {"stage": 0}},
    "two tensor ranks, ZeRO 1": {"model_parallel_size": 2},
    "two data ranks": {},
}
"""Ways of running the file in GPT-NeoX; it has no pipeline and ZeRO 1."""


class Theirs(NamedTuple):
    """A run of GPT-NeoX's trainer: its folder with `part0.yml`, `data` and `save`, and what it reported."""

    folder: Path
    steps: list[Step]


Runs = Callable[[str], Theirs]


@pytest.fixture(scope="module")
def runs(checkout: Checkout, initial: Path, text: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """runs(division): the twenty steps of GPT-NeoX's trainer from our weights, run once."""

    @cache
    def run(division: str) -> Theirs:
        folder, keys = tmp_path_factory.mktemp("theirs"), scaled(DIVISIONS[division])
        pipe, tensor = keys.get("pipe_parallel_size", 0), keys.get("model_parallel_size", 1)
        export_neox(initial, folder / "initial", [], None, tensor, min(pipe, 1))
        twin.write(folder / "data/theirs", text, VOCABULARY)
        ranks = 2 if division == "two data ranks" else max(pipe, 1) * tensor
        output = checkout.deepy("train.py", folder, keys, loading(folder, "initial"), ranks=ranks)
        return Theirs(folder, steps(output))

    return run


def loading(folder: Path, name: str, finetune: bool = True) -> dict[str, Any]:
    """What a run of GPT-NeoX's has besides the model, which starts from `name` in `folder`."""
    places = {"load": str(folder / name), "save": str(folder / "save"), "master_port": free_port()}
    return RUN | paths(folder / "data/theirs") | places | {"finetune": finetune}


Ours = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ours(runs: Runs, text: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """ours(weights, steps, **keys): what our trainer reports of each step, on the very file that GPT-NeoX had."""
    folder, theirs = tmp_path_factory.mktemp("ours"), runs("as in the file").folder
    twin.write_for_us(folder / "data", in_their_order(theirs, text), VOCABULARY, scaled({})["seed"])

    def run(weights: Path, count: int, **changes: Any) -> list[dict[str, Any]]:
        save = Path(changes.pop("save", tmp_path_factory.mktemp("run") / "save"))
        keys = {"finetune": True} | changes | RUN | paths(folder / "data") | {"load": str(weights), "save": str(save)}
        command = [sys.executable, str(ROOT / "train.py"), str(theirs / "part0.yml"), *command_line(keys)]
        command += [f"train_iters={count}", f"lr_decay_iters={STEPS}"]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (save / "metrics.jsonl").read_text().splitlines()
        return [found for line in lines if "loss" in (found := json.loads(line))]

    return run


def in_their_order(folder: Path, text: np.ndarray) -> np.ndarray:
    """The samples as GPT-NeoX's maps beside its file say."""
    (shuffle,) = folder.glob("data/theirs_train*_shuffle_idx.npy")
    (places,) = folder.glob("data/theirs_train*_sample_idx.npy")
    starts = np.load(places)
    assert (starts[:, 0] == 0).all() and (np.diff(starts[:, 1]) == LENGTH).all(), "samples follow one another"
    return text[np.load(shuffle)]


@pytest.fixture(scope="module")
def expected(ours: Ours, initial: Path) -> list[dict[str, Any]]:
    """Our trainer's twenty steps."""
    return ours(initial, STEPS)


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_first_losses_and_rates_are_those_of_our_trainer(
    division: str, runs: Runs, expected: list[dict[str, Any]]
) -> None:
    found = runs(division).steps
    assert [step.number for step in found] == [line["step"] for line in expected] == [*range(1, STEPS + 1)]
    for step, line, after in zip(found, expected, [*expected[1:], expected[-1]], strict=True):
        # Seven digits are printed; beyond them, sums in another order grow over the steps.
        assert step.loss == pytest.approx(line["loss"], abs=5e-6)
        assert step.next_rate == pytest.approx(after["lr"], rel=1e-3), "four digits are printed"
    assert max(line["grad_norm"] for line in expected) > 1.0, "clipping took part"
    assert found[-1].loss < found[0].loss - 0.3


@pytest.mark.parametrize("division", DIVISIONS)
def test_our_trainer_goes_on_from_their_checkpoint(division: str, runs: Runs, ours: Ours) -> None:
    losses = [line["loss"] for line in ours(runs(division).folder / "save", 2)]
    reference = [line["loss"] for line in ours(runs("as in the file").folder / "save", 2)]
    assert losses == pytest.approx(reference, abs=5e-6)
    assert losses[0] < runs(division).steps[0].loss - 0.3, "what was learned is there"


@pytest.mark.parametrize("division", [name for name, keys in DIVISIONS.items() if "zero_optimization" not in keys])
def test_our_trainer_goes_on_with_their_optimizer(division: str, runs: Runs, ours: Ours) -> None:
    """From step 10: the losses and rates of their run, which went on."""
    whole, keys = runs(division), {"finetune": False, "iteration": STEPS // 2}
    found = ours(whole.folder / "save", STEPS, **keys)
    assert [line["step"] for line in found] == [step.number for step in whole.steps[STEPS // 2 :]]
    for line, step, before in zip(found, whole.steps[STEPS // 2 :], whole.steps[STEPS // 2 - 1 :], strict=False):
        assert line["loss"] == pytest.approx(step.loss, abs=5e-6)
        assert line["lr"] == pytest.approx(before.next_rate, rel=1e-3), "four digits are printed"
    anew = ours(whole.folder / "save", STEPS, **keys, no_load_optim=True)
    assert anew[0]["loss"] == found[0]["loss"] and abs(anew[-1]["loss"] - found[-1]["loss"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_qk_layernorm": True}, "qk_layernorm.weight"),
        ({"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}}, "position_offsets"),
    ],
    ids=["norms of queries and keys", "offsets of PoPE"],
)
def test_other_weights_of_attention_go_both_ways(
    changes: dict[str, Any], name: str, checkout: Checkout, ours: Ours, text: np.ndarray, tmp_path: Path
) -> None:
    """Trained there from our weights, evaluated and exported here."""
    torch.manual_seed(5)
    initial = write_checkpoint(tmp_path / "ours/run", load_config([], scaled(changes)))
    export_neox(initial, tmp_path / "initial", [], None, 1, 0)
    twin.write(tmp_path / "data/theirs", text, VOCABULARY)
    found = steps(checkout.deepy("train.py", tmp_path, scaled(changes), loading(tmp_path, "initial")))
    losses = [line["loss"] for line in ours(initial, STEPS, **changes)]
    assert [step.loss for step in found] == pytest.approx(losses, abs=5e-6)
    before, saved = dict(open_checkpoint(initial).weights()), dict(open_checkpoint(tmp_path / "save").weights())
    trained = [(weight - before[key]).abs().max() for key, weight in saved.items() if name in key]
    assert len(trained) == 2 and min(trained) > 1e-3
    assert ours(tmp_path / "save", 1, **changes)[0]["loss"] < losses[0] - 0.3
    exported = export(tmp_path / "save", tmp_path / "exported").folder
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY
    with torch.no_grad():
        assert torch.equal(load_model(exported)(tokens), load_model(tmp_path / "save")(tokens))


def test_their_trainer_resumes_with_its_rates_and_data(checkout: Checkout, runs: Runs) -> None:
    folder, whole = runs("as in the file")
    resumed = folder / "resumed"
    shutil.copytree(folder / f"save/global_step{STEPS // 2}", resumed / f"global_step{STEPS // 2}")
    (resumed / "latest").write_text(f"global_step{STEPS // 2}")
    (folder / "again").mkdir()
    files = scaled({}), loading(folder, "resumed", finetune=False) | {"save": str(folder / "again/save")}
    found = steps(checkout.deepy("train.py", folder / "again", *files, before=IMPORTING))
    assert [step.number for step in found] == [step.number for step in whole[STEPS // 2 :]]
    for step, before in zip(found, whole[STEPS // 2 :], strict=True):
        assert step.next_rate == before.next_rate and step.loss == pytest.approx(before.loss, abs=2e-6)


def test_the_first_command_validates_and_saves(checkout: Checkout, text: np.ndarray, tmp_path: Path) -> None:
    """`350M_coca local_setup` of docs/neox.md, with a smaller shape and on the CPU: upstream's pipeline of one stage
    validates, which ends in a TypeError without the plugin.
    """
    model, machine = (yaml.safe_load((checkout.home / f"configs/{name}.yml").read_text()) for name in FIRST_COMMAND)
    assert model["pipe_parallel_size"] == 1 and model["eval_iters"] > 0, "the page's command"
    assert not {name.replace("-", "_") for name in SMALLER} - {name.replace("-", "_") for name in model}
    replaced = ("fp16", "pos_emb", "pos-emb")
    model = {name: value for name, value in model.items() if name not in replaced} | SMALLER | {"pos_emb": "coca"}
    twin.write(tmp_path / "data", text, VOCABULARY)
    machine = paths(tmp_path / "data") | {"tokenizer_type": "CharLevelTokenizer", "master_port": free_port()}
    machine |= {"save": str(tmp_path / "checkpoints"), "load": str(tmp_path / "checkpoints")}
    found = checkout.deepy("train.py", tmp_path, model, machine)
    assert [step.number for step in steps(found)] == [1, 2, 3, 4]
    losses = [float(loss) for loss in re.findall(r"validation results at iteration \d+ \| lm_loss value: (\S+)", found)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert (tmp_path / "checkpoints/latest").read_text() == "global_step4"


@pytest.mark.parametrize("kind", ["trained", "bpe", "unigram", "bytes"])
def test_a_tokenizer_of_ours_opens_there(kind: str, checkout: Checkout, tmp_path: Path) -> None:
    """tokenizers 0.15, which upstream pins, reads merges as strings only: trained here, or exported with a model."""
    texts, path = [(ROOT / "docs" / name).read_text() for name in ("attention.md", "config.md")], tmp_path / "a.json"
    if kind == "trained":
        ours: Tokenizer = train_bpe(texts, 600, path)
    else:
        train = {"bpe": train_sentencepiece, "unigram": train_unigram}.get(kind)
        ours = train(texts, 600, tmp_path / "a.model") if train else load_tokenizer("CharLevelTokenizer")
        files, note = tokenizer_files(ours)
        assert note is None
        path.write_bytes(files["tokenizer.json"])
    script = "import json, sys, tokenizers; opened = tokenizers.Tokenizer.from_file(sys.argv[1])"
    script += "; print('IDS', json.dumps([opened.encode(text).ids for text in json.loads(sys.argv[2])]))"
    given = [texts[0][:2000], "naïve\n\n    indented  code"]
    done = checkout.run(["-c", script, str(path), json.dumps(given)], {})
    assert done.status == 0, done.output
    assert json.loads(done.output.partition("IDS ")[2]) == [list(ours.encode(text)) for text in given]


FIRST_COMMAND = ("350M", "local_setup")
SMALLER: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": LENGTH},
    **{"max_position_embeddings": LENGTH, "train_iters": 4, "lr_decay_iters": 4, "checkpoint_factor": 4},
    **{"eval_interval": 2, "eval_iters": 2, "log_interval": 1, "distributed_backend": "gloo"},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1.0e-8}},
}
CONVERTER = "tools/ckpts/convert_neox_to_hf.py"


@pytest.mark.parametrize("division", ["as in the file", "one stage"])
def test_upstreams_converter_rejects_what_the_plugin_trained(
    division: str, checkout: Checkout, runs: Runs, tmp_path: Path
) -> None:
    """It ends in an error about the name. The same weights under plain names are converted in silence."""
    keys = {"pipe_parallel_size": 0, "model_parallel_size": 1} | scaled(DIVISIONS[division]) | RUN
    (tmp_path / "model.yml").write_text(yaml.safe_dump(keys))
    step, plain = runs(division).folder / f"save/global_step{STEPS}", tmp_path / "plain"
    shutil.copytree(step, plain)
    for path in plain.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        held = content.get("module") or content
        for name in [name for name in held if "megatron_coca" in name]:
            held[name.replace("megatron_coca_", "")] = held.pop(name)
        torch.save(content, path)

    def convert(folder: Path) -> Finished:
        arguments = ["--input_dir", str(folder), "--config_file", str(tmp_path / "model.yml")]
        arguments += ["--output_dir", str(tmp_path / "out"), "--no_save_tokenizer"]
        return checkout.run([CONVERTER, *arguments], {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})

    found = convert(step)
    assert found.status == 1 and "KeyError" in found.output and "attention.query_key_value.weight" in found.output
    assert not (tmp_path / "out").exists()
    assert convert(plain).status == 0
    for path in (plain / "configs").iterdir():
        path.write_text(path.read_text().replace("pos_emb: coca", "pos_emb: rotary"))
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY
    with torch.no_grad():
        converted, rotary, coca = (load_model(place)(tokens) for place in (tmp_path / "out", plain, step))
    torch.testing.assert_close(converted, rotary, rtol=0, atol=1e-5)
    assert (converted - coca).abs().max() > 0.02


@pytest.mark.parametrize("division", ["as in the file", "one stage"])
def test_what_the_plugin_trained_is_not_loaded_as_rotary(
    division: str, checkout: Checkout, runs: Runs, tmp_path: Path
) -> None:
    whole = runs(division).folder
    stock = scaled(DIVISIONS[division]) | {"pos_emb": "rotary", "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    foreign = {*("vocab_size", "lr_warmup_init", "lr_decay_style", "precision", "train_batch_size")}
    stock = {name: value for name, value in stock.items() if name not in foreign}
    run = loading(whole, "save", finetune=False) | {"no_load_optim": True, "no_load_rng": True}
    stock["make_vocab_size_divisible_by"] = VOCABULARY
    run |= {"save": str(tmp_path / "save")}
    found = checkout.deepy("train.py", tmp_path, stock, run, before=["deepy.py"], fails=True)
    assert "RuntimeError" in found and "attention.megatron_coca_query_key_value.weight" in found
    found = checkout.deepy("train.py", tmp_path, stock, run | {"master_port": free_port()}, fails=True)
    assert "neox_plugin: pos_emb: rotary does not fit" in found and "Traceback" not in found
    stock["pos_emb"] = "xpos"
    found = checkout.deepy("train.py", tmp_path, stock, run | {"master_port": free_port()}, fails=True)
    assert "pos_emb: xpos, but " in found and "was trained with coca" in found and "Traceback" not in found


def test_what_the_plugin_trained_is_exported(runs: Runs, tmp_path: Path) -> None:
    save = runs("one stage").folder / "save"
    exported = export(save, tmp_path / "exported").folder
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY
    with torch.no_grad():
        assert torch.equal(load_model(exported)(tokens), load_model(save)(tokens))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def compared(request: pytest.FixtureRequest, checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/neox/inside/logits.py finds of all cases."""
    folder, ranks = tmp_path_factory.mktemp("logits"), request.param
    names = CASES if ranks == 1 else DIVIDED
    (folder / "cases.json").write_text(json.dumps({name: CASES[name] for name in names}))
    checkout.inside("logits.py", str(folder / "cases.json"), str(folder / "out.json"), ranks=ranks)
    return json.loads((folder / "out.json").read_text())


def test_logits_and_gradients_are_those_of_our_model(compared: Any) -> None:
    for name, found in compared.items():
        assert found["spread"] > 0.5
        assert max(found[kind] for kind in ("whole", "gradient", "cached")) < 1e-5, f"{name}: {found}"


def test_positions_of_upstreams_are_untouched(checkout: Checkout, tmp_path: Path) -> None:
    for name, plugin in (("with", True), ("without", False)):
        checkout.inside("untouched.py", str(tmp_path / name), plugin=plugin)
    found = json.loads((tmp_path / "with").read_text())
    assert len(set(found.values())) == 6 and found == json.loads((tmp_path / "without").read_text())


def test_upstreams_files_are_read_as_the_table_says(checkout: Checkout) -> None:
    """Parameters of the model at its real shape; `after a model`: a file that is given after a model's; or the keys
    that are refused.
    """
    configs = checkout.home / "configs"
    found = {str(path.relative_to(configs)): outcome(configs, path) for path in sorted(configs.rglob("*.yml"))}
    assert found == yaml.safe_load((ROOT / "tests/neox/upstream_files.yaml").read_text())


def outcome(configs: Path, path: Path) -> int | str:
    for files in ([path], [configs / "125M.yml", path]):
        try:
            config = load_config([str(file) for file in files], {"vocab_size": 50304})
        except ConfigError as error:
            problems = [problem.partition(": ")[2].partition(":")[0] for problem in error.problems]
            if "describes no model" in str(error):
                continue
            return f"refused: {', '.join(problems)}"
        if len(files) > 1:
            return "after a model"
        return sum(weight.numel() for weight in empty_model(config, "cpu", memory="meta").parameters())
    return "refused"


def test_the_recipes_are_read_as_they_are(checkout: Checkout, tmp_path: Path) -> None:
    files = sorted(map(str, (ROOT / "configs/350M").glob("*.yml")))
    checkout.inside("files.py", str(tmp_path / "out"), *files)
    found = json.loads((tmp_path / "out").read_text())
    for name in ("kerple_log", "kerple_power"):
        assert "GPT-NeoX has no weights for it" in found.pop(name)["error"]
    assert len(found) == len(files) - 2
    methods = {name: values["pos_emb"] for name, values in found.items()}
    assert methods["roformer_coca"] == "coca" and methods["roformer"] == "rotary" and methods["nope"] == "none"
    others = {"optimizer_type": "Adam", "gradient_accumulation_steps": 2, "train_batch_size": 256, "vocab_size": 50304}
    others |= {"lr_warmup_init": 1e-7}
    assert found.pop("roformer_coca_authors").items() >= (others | {"vocab_size": 100864}).items(), "their tokenizer"
    for values in found.values():
        assert values.items() >= others.items()


GENERATED = 48
PROMPTS = ("The sea was calm. " * 6).strip(), "A small boat lay near its shore until morning came over"
"""Longer than the training length, and such that what is generated crosses it."""
EXTENDED: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our checkpoint with weights so large that every token matters for the next."""
    torch.manual_seed(6)
    config = load_config([], scaled({}))
    weights = {
        name: weight + 0.1 * torch.randn_like(weight) for name, weight in build_model(config).state_dict().items()
    }
    return write_checkpoint(tmp_path_factory.mktemp("drawn") / "run", config, weights)


@pytest.mark.parametrize("recompute", [False, True], ids=["with a cache", "anew"])
@pytest.mark.parametrize("pipe", [0, 1])
def test_generation_beyond_the_training_length(
    recompute: bool, pipe: int, checkout: Checkout, drawn: Path, tmp_path: Path
) -> None:
    export_neox(drawn, tmp_path / "weights", [], None, 1, pipe)
    longer = {"seq_length": 3 * LENGTH, "max_position_embeddings": 3 * LENGTH, "pipe_parallel_size": pipe}
    scaling = EXTENDED["rope_scaling"] | {"original_max_position_embeddings": LENGTH}
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    run = {
        "load": str(tmp_path / "weights"),
        "text_gen_type": "input-file",
        "sample_input_file": str(tmp_path / "prompts"),
    }
    run |= {
        "finetune": True,
        "maximum_tokens": GENERATED,
        "sample_output_file": str(tmp_path / "out"),
        "recompute": recompute,
    }
    run |= {"tokenizer_type": "CharLevelTokenizer", "distributed_backend": "gloo", "master_port": free_port()}
    checkout.deepy("generate.py", tmp_path, scaled(longer | {"rope_scaling": scaling}), run)
    found = [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()]
    model = load_model(drawn, EXTENDED)
    assert found == [text_of(greedy(model, list(prompt.encode()), recompute)) for prompt in PROMPTS]


@torch.no_grad()
def greedy(model: GPT, tokens: list[int], recompute: bool) -> list[int]:
    """What follows `tokens` in our model. With a cache, a step sees the length so far; anew, GPT-NeoX runs all places
    that there are and so sees `seq_length` at every step.
    """
    cache, answer = model.new_cache(), []
    for _ in range(GENERATED):
        new = torch.tensor([tokens + answer] if recompute or not answer else [answer[-1:]])
        if recompute:
            hidden = model.hidden_states(new, length=3 * LENGTH, last=1)
        else:
            hidden = model.hidden_states(new, cache=cache, last=1)
        answer.append(int(model.logits(hidden)[0, -1].argmax()))
    return answer


def text_of(tokens: list[int]) -> str:
    """As GPT-NeoX's tokenizer of characters writes it."""
    return "".join(chr(max(32, token)) for token in tokens)
