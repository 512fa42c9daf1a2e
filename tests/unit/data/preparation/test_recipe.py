"""Recipes: their meaning, their errors, and the shipped recipe against the run configuration beside it."""

from pathlib import Path

import pytest
import yaml

from megatron_coca.data import DataError
from megatron_coca.data.preparation.preparation_plan import Rules, shard_name
from megatron_coca.data.preparation.recipe import read_recipe, resolve_recipe
from megatron_coca.data.readers.source import Filters

CONFIGS = Path(__file__).resolve().parents[4] / "configs" / "data"
BASE = "tokenizer_type: CharLevelTokenizer\nsources:\n  a:\n    paths: [x]\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yml"
    path.write_text(text)
    return path


def test_a_recipe_says_what_is_read_and_how(tmp_path: Path) -> None:
    for name in ("b2.txt", "b1.txt", "c.json"):
        (tmp_path / name).touch()
    recipe = read_recipe(
        write(
            tmp_path,
            f"""
root: {tmp_path}
output: out
train_tokenizer: {{vocab_size: 500}}
valid_fraction: 0.1
sources:
  books: {{paths: ["*.txt"], documents: line, weight: 3, duplicates: keep, fraction: 0.5, split: train}}
  pile: {{paths: [c.json], sets: {{Pile-CC: 2, ArXiv: 1}}, fields: {{text: content}}, weight: 1}}
  code: {{reader: repositories, paths: [src], metadata: m.jsonl, weight: 1, max_record_mib: 2,
    filters: {{min_stars: 1, max_bytes: 9}}}}
""",
        )
    )
    books, pile, code = recipe.sources
    assert books.spec.paths == [tmp_path / "b1.txt", tmp_path / "b2.txt"] and books.spec.documents == "line"
    assert (books.weight, books.duplicates, books.fraction, books.split) == (3, "keep", 0.5, "train")
    assert (
        pile.spec.sets == ("Pile-CC", "ArXiv") and pile.spec.divide and pile.set_weights == {"Pile-CC": 2, "ArXiv": 1}
    )
    assert pile.spec.fields == {"text": "content"}
    assert code.spec.filters == Filters(min_stars=1, max_bytes=9) and code.spec.metadata == tmp_path / "m.jsonl"
    assert [each.spec.max_record for each in recipe.sources] == [64 << 20, 64 << 20, 2 << 20]
    assert recipe.rules == Rules(0.1, 0.01) and recipe.output == "out" and recipe.tokenizer is None
    assert recipe.training is not None and recipe.training.vocab_size == 500


def test_one_text_stands_for_a_list(tmp_path: Path) -> None:
    text = BASE.replace("[x]", "x\n    sets: ArXiv\n    filters: {languages: Python}")
    (source,) = read_recipe(write(tmp_path, text), root=tmp_path).sources
    assert source.spec.paths == [tmp_path / "x"] and source.spec.sets == ("ArXiv",) and not source.spec.divide
    assert source.spec.filters == Filters(languages=("Python",))


def test_another_root_moves_every_path(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, "root: /nowhere\n" + BASE), root=tmp_path)
    assert recipe.sources[0].spec.paths == [tmp_path / "x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "    wieght: 1\n", r"recipe\.yml: sources\.a\.wieght: unknown key.*`weight`"),
        (BASE + "    filters: {minstars: 1}\n", r"sources\.a\.filters\.minstars: unknown key.*`min_stars`"),
        (BASE + "    max_record_mib: 0\n", r"sources\.a\.max_record_mib: .*equal to 1"),
        (BASE + "    weight: -1\n", r"sources\.a\.weight: .*greater than 0"),
        (BASE + "    duplicates: all\n", r"sources\.a\.duplicates: .*'exact' or 'keep'"),
        (BASE + "    documents: page\n", r"sources\.a\.documents: .*'file' or 'line'"),
        (BASE + "test_fracton: 1\n", "test_fracton: unknown key.*`test_fraction`"),
        ("sources: {a: {paths: [x]}}\n", "set either tokenizer_type .*or train_tokenizer"),
        (BASE + "train_tokenizer: {vocab_size: 9}\n", "two tokenizers; remove one"),
        ("tokenizer_type: CharLevelTokenizer\n", "sources: Field required"),
        (
            "tokenizer_type: CharLevelTokenizer\nsources: {a: {paths: ['*.no']}}\n",
            r"\*\.no: no file matches this pattern",
        ),
        (
            "train_tokenizer: {vocab_size: 9, model: unigram}\nsources: {a: {paths: [x]}}\n",
            "train_tokenizer.model: unknown key.*vocab_size, characters",
        ),
        (BASE + "vocab_file: x\n", "vocab_file has no effect with CharLevelTokenizer"),
        ("train_tokenizer: {vocab_size: 300}\nmerge_file: x\nsources: {a: {paths: [x]}}\n", "merge_file has no effect"),
        ("a: [", r"recipe\.yml:1: not valid YAML"),
        ("- a\n", "must be a mapping of keys to values, not"),
        (BASE + "  a: {paths: [y]}\n", "the key 'a' is given twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_recipe(write(tmp_path, text))
    with pytest.raises(DataError, match="none.yml: cannot be read"):
        read_recipe(tmp_path / "none.yml")


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipes").glob("*.yml")), ids=lambda path: path.stem)
def test_shipped_recipes_go_with_their_run_configurations(path: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    for source in values["sources"].values():
        for number, pattern in enumerate(source["paths"]):
            (tmp_path / pattern.replace("*", str(number))).mkdir(parents=True)
    recipe = read_recipe(path, root=tmp_path)
    keys = yaml.safe_load((CONFIGS / path.name).read_text())
    shares = {"train": 1.0, "valid": recipe.rules.valid_fraction, "test": recipe.rules.test_fraction}
    for split, share in shares.items():
        sources = [source for source in recipe.sources if source.split == split or (share and not source.split)]
        names = [shard_name(source.spec.name, "", split) for source in sources]
        assert keys[f"{split}_data_paths"] == [f"{recipe.output}/{name}" for name in names]
        assert keys[f"{split}_data_weights"] == [source.weight for source in sources]
    assert sum(keys["train_data_weights"]) == pytest.approx(1) and keys["train_data_weights"][-1] == 0.25


def test_a_tilde_is_the_home_folder_and_brackets_of_a_path_are_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "my [corpus]"
    (root / "a [1]").mkdir(parents=True)
    for name in ("a [1]/x [2].txt", "a [1]/y.txt", "b1.txt", "b2.txt"):
        (root / name).write_text("text")
    values = {
        "root": "~/my [corpus]",
        "output": "~/out",
        "tokenizer_type": "CharLevelTokenizer",
        "sources": {
            "one": {"paths": ["a [1]/x [2].txt", "b[12].txt"]},
            "two": {"paths": ["a [1]", "~/my [corpus]/b1.txt", "a [1]/y*.txt", "*/x*"]},
        },
    }
    recipe = resolve_recipe(values, "r.yml")
    found = [[str(Path(path).relative_to(root)) for path in source.spec.paths] for source in recipe.sources]
    assert found == [["a [1]/x [2].txt", "b1.txt", "b2.txt"], ["a [1]", "b1.txt", "a [1]/y.txt", "a [1]/x [2].txt"]]
    assert recipe.output == f"{tmp_path}/out"
