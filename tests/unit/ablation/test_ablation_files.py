"""The shipped ablations, at every scale: each model can be trained, each variant fits it, each task has its options."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_coca import methods
from megatron_coca.ablation import evaluations, grid
from megatron_coca.ablation.file import AblationFile, ModelEntry, read_ablation
from megatron_coca.ablation.grid import Cell, configured, expand
from megatron_coca.commands.evaluate import parser
from megatron_coca.config import Config, load_config
from megatron_coca.evaluation.labels import full_label
from megatron_coca.evaluation.multiples import changes_in_tokens
from megatron_coca.evaluation.suite import option_arguments, read_suite, task_variants
from megatron_coca.model.build import empty_model
from megatron_coca.support.safe_yaml import read_yaml

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs" / "ablations").glob("*.yml"))
SCALES = ("tiny", "small", "350M")
UNITS = {f"rerope_{name}.yml" for name in ("ntk", "windows", "leaky", "inv_leaky")}  # scale 100M too
STUDY = ROOT / "studies" / "methods" / "plan.yml"
GRID = [pytest.param(file, scale, id=f"{file.stem}-{scale}") for file in FILES for scale in SCALES]
GRID += [pytest.param(file, "100M", id=f"{file.stem}-100M") for file in FILES if file.name in UNITS]
GRID += [pytest.param(STUDY, scale, id=f"study-{scale}") for scale in ("1M", "250k")]


CPU_SCALES = ("tiny", "1M", "250k")
PARSER = parser()


@cache
def read(file: Path, scale: str | None = None) -> AblationFile:
    """A file at a scale, read once for all tests."""
    return read_ablation(file, scale)


def loaded(changes: list[str] | None, base: Config) -> Config:
    texts = changes_in_tokens(changes or [], base.model.seq_length)
    return base.override([text for text in texts if "=" in text], [text for text in texts if "=" not in text])


def models(file: Path, scale: str | None) -> dict[str, tuple[Config, dict[str, Config]]]:
    """For each model its training configuration and those of its variants."""
    ablation = read(file, scale)
    base = load_config(
        [text for text in ablation.base if "=" not in text], [text for text in ablation.base if "=" in text]
    )
    found = {}
    for name, entry in ablation.models.items():
        trained = configured(base, entry)
        found[name] = trained, {label: loaded(changes, trained) for label, changes in entry.variants.items()}
    return found


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations name prepared corpora, which are not there."""
    monkeypatch.chdir(ROOT)
    opened = {"identity": {}, "tokenizer": None}
    monkeypatch.setattr(grid, "open_corpus", lambda config: SimpleNamespace(config=config, **opened))
    monkeypatch.setattr(grid.PromptLengths, "faults", lambda *of_corpus: [])  # needs the corpus's tokenizer
    monkeypatch.setattr(evaluations, "find_sources", lambda names: [])


@pytest.mark.parametrize(("file", "scale"), GRID)
def test_every_file_is_a_grid_of_cells_and_models(file: Path, scale: str) -> None:
    """`expand` checks models, variants, tasks and their options."""
    ablation = read(file, scale)
    cells = expand(ablation)
    assert len(cells) == len(ablation.models) * len(ablation.seeds)
    assert ablation.baseline in ablation.models and len(ablation.seeds) >= (1 if scale in ("100M", "350M") else 2)
    files = {file.name for cell in cells for command in cell.commands for file in command.files}
    only = {task.partition(" ")[0]: task_variants(options)[0] for task, options in ablation.tasks.items()}
    labels = [
        (task, full_label(name, label))
        for task, variants in only.items()
        for name, entry in ablation.models.items()
        for label in entry.variants
        if variants is None or label in variants
    ]
    assert len(files) == len(labels), "a label of its own in the report, also as a file name"
    firsts = {cell.model: cell for cell in reversed(cells)}  # the seeds have the same options
    for cell in firsts.values():
        length = cell.config.model.seq_length
        for command in cell.commands:
            args = PARSER.parse_args(command.arguments)
            lengths = getattr(args, "windows", None) or args.lengths
            assert max(lengths) <= 64 * length and len(set(lengths)) == len(lengths)
        check_variants_are_models(cell, ablation.models[cell.model], "cpu" if scale in CPU_SCALES else "cuda")


def check_variants_are_models(cell: Cell, entry: ModelEntry, device: str) -> None:
    seen: list[Config] = []
    for label, changes in entry.variants.items():
        config = loaded(changes, cell.config)
        assert config not in seen, f"{cell.model} {label}: measured twice"
        seen.append(config)
        layers = 4 if config.position.layer_types else 1
        training = config == cell.config
        empty_model(config.override({"num_layers": layers}), device, training=training, memory="meta")


def test_the_first_scale_is_the_default() -> None:
    for file in FILES:
        content = read_yaml(file)
        assert isinstance(content, dict) and tuple(content["scales"]) == SCALES + ("100M",) * (file.name in UNITS)
        assert read(file) == read(file, "tiny")


def test_the_page_counts_models_and_variants_and_cells() -> None:
    page = (ROOT / "configs" / "ablations" / "README.md").read_text()
    rows = {
        row[0]: (int(row[1]), int(row[2]))
        for row in re.findall(r"^\| `(\w+)\.yml` \|.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    }
    counted = {}
    for file in FILES:
        variants = [len(entry.variants) for entry in read(file, "tiny").models.values()]
        counted[file.stem] = (len(variants), sum(variants))
    assert rows == counted
    totals = []
    for scale in SCALES:
        ablations = [read(file, scale) for file in FILES]
        assert len({each.runs for each in ablations}) == 1 and len({each.results for each in ablations}) == len(FILES)
        cells = {(name, seed) for each in ablations for name in each.models for seed in each.seeds}
        totals.append(len(cells))
    tiny, small, large = totals
    assert f"`tiny` has {tiny} cells in all, `small` {small} and `350M` {large}." in page


def test_a_model_of_several_files_is_the_same_model() -> None:
    """Cells are named by model and configuration: only then is it trained once."""
    known: dict[str, list[str]] = {}
    for file in FILES:
        for name, entry in read(file, "tiny").models.items():
            assert known.setdefault(name, entry.set) == entry.set, f"{file.name}: {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_comments_count_the_cells(file: Path) -> None:
    comment = file.read_text().partition("title:")[0].replace("\n# ", " ")
    assert f"megatron-coca ablate configs/ablations/{file.name} --scale tiny" in comment
    counts = re.findall(r"(tiny|small|350M): (\d+) cells", comment)
    assert counts or "not trained again" in comment
    for scale, count in counts:
        ablation = read(file, scale)
        assert int(count) == len(ablation.models) * len(ablation.seeds), scale


def test_scale_350m_is_the_published_recipe() -> None:
    """Each model of methods.yml is the file of configs/350M for it, on the paper's data and GPUs."""
    files = [ROOT / "configs/data/pile_books_wiki_code.yml", ROOT / "configs/cluster/a100x8.yml"]
    published = [load_config([file, *files]) for file in sorted((ROOT / "configs" / "350M").glob("*.yml"))]
    recipes = [each.override({"save": None}) for each in published if not each.model.gpt_j_residual]
    trained = [config for config, _ in models(ROOT / "configs/ablations/methods.yml", "350M").values()]
    plain = {"save": None, "max_position_embeddings": 512}
    assert {each.position.pos_emb for each in trained} >= {
        *("rotary", "coca", "coca_strict", "xpos", "alibi", "kerple_log", "kerple_power", "rpe"),
        *("learned", "sinusoidal", "none"),
    }
    assert all(each.override(plain) in recipes for each in trained) and len(trained) == len(recipes)


def test_tiny_is_the_quickstart() -> None:
    tiny = load_config(ROOT / "configs/ablations/bases/tiny.yml").flat()
    quickstart = load_config(ROOT / "configs/quickstart/roformer.yml").flat()
    others = {"save", "keep_last_n_checkpoints", "eval_interval", "train_iters", "checkpoint_factor"}
    assert {key for key in tiny if tiny[key] != quickstart[key]} == others


def test_tables_1_and_2_at_350m_are_measured_as_by_the_suite_of_the_paper() -> None:
    ours = read(ROOT / "configs/ablations/coca_tables_1_2.yml", "350M").tasks
    suite = read_suite(ROOT / "configs/evaluation/paper_350m.yml").tasks
    for task in ours:
        calls = (option_arguments(task, options[task], 512) for options in (ours, suite))
        given, published = (PARSER.parse_args([task, "--checkpoint", "runs/x", *call]) for call in calls)
        if task == "perplexity":
            assert published.max_length == max(given.windows), "the default"
            given.max_length = published.max_length
        assert given == published


def test_every_pattern_of_layers_is_measured() -> None:
    """Gemma 3's two bases in OLMo 3's pattern, because four layers have no sixth."""
    entries = [text for entry in read(FILES[0].with_name("layers.yml")).models.values() for text in entry.set]
    used = {Path(text).stem for text in entries if text.startswith("configs/layers/")}
    assert used == {file.stem for file in (ROOT / "configs" / "layers").glob("*.yml")} - {"gemma3"}
    assert any("rotary_emb_base" in text for text in entries)


ADD = "add a file in configs/extend/ to configs/ablations/extensions.yml, and correct the counts in docs/ablations.md"


def test_every_extension_and_map_is_measured() -> None:
    found = models(ROOT / "configs/ablations/extensions.yml", "small")
    positions = [config.position for _, variants in found.values() for config in variants.values()]
    scaled = {each.rope_scaling.rope_type for each in positions if each.rope_scaling}
    assert scaled == set(methods.names("rope_scaling", compute=None)) - {"default", "longrope", "proportional"}, ADD
    mapped = {each.relative_positions.type for each in positions if each.relative_positions}
    assert mapped == set(methods.names("relative_positions", compute=None)) - {"inv_leaky_rerope"}, ADD
