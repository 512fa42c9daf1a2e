"""Synthetic tasks: the content of samples, the loss mask, and that samples depend only on seed and number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import DataError, Loader, SyntheticSamples, TaskSettings
from megatron_coca.data.identity import differing_data
from megatron_coca.data.shards import ShardWriter
from megatron_coca.data.synthetic import QUESTIONS, TASKS, Draws, chances_without_order, ordered_question
from megatron_coca.training.corpus import open_corpus

MODEL = "configs/recall/model.yml"
NUMBERS = np.arange(300)


def read(task: str, length: int = 64, **sizes: Any) -> tuple[TaskSettings, np.ndarray, np.ndarray]:
    settings = TaskSettings(task, **sizes)
    batch = SyntheticSamples(settings, length, seed=3).read(NUMBERS)
    assert batch.loss_mask is not None
    assert batch.tokens.shape == (len(NUMBERS), length + 1)
    assert batch.tokens.min() >= 0 and batch.tokens.max() < settings.vocab_size
    return settings, batch.tokens, batch.loss_mask


@pytest.mark.parametrize("task", ["recall", "multi_query"])
def test_every_question_follows_its_fact_and_is_answered_by_it(task: str) -> None:
    settings, tokens, mask = read(task)
    counts = mask.sum(axis=1)
    assert set(counts) == ({8} if task == "recall" else set(range(1, 9)))
    for row, asked in zip(tokens, mask, strict=True):
        facts = {int(token): place for place, token in enumerate(row) if 32 <= token < 32 + 256}
        assert len(facts) == asked.sum()
        for place in np.flatnonzero(asked):
            key, value = int(row[place]) - 288, int(row[place + 1]) - 304
            assert 0 <= key < 16 and 0 <= value < 16
            assert facts[int(settings.fact(np.array(key), np.array(value)))] < place


def test_facts_of_recall_are_at_all_distances() -> None:
    _, tokens, mask = read("recall")
    questions = np.concatenate([np.flatnonzero(row) for row in mask])
    facts = np.concatenate([np.flatnonzero((row >= 32) & (row < 288)) for row in tokens])
    assert set(facts) == set(range(63)) and set(questions) == set(range(1, 64))
    assert {int(value) for value in tokens[:, :-1][mask]} == set(range(288, 304))


def answer_by_order(settings: TaskSettings, facts: list[tuple[int, int]], token: int) -> int:
    """The value that a question of ordered recall asks for, after `facts` (keys and values in their order)."""
    first_key = settings.filler_tokens + settings.keys * settings.values
    offset = token - first_key
    if offset < settings.keys:
        return [value for key, value in facts if key == offset][-1]
    offset -= settings.keys + settings.values
    if offset < settings.keys:
        return next(value for key, value in facts if key == offset)
    return facts[-1 - (offset - settings.keys)][1]


@pytest.mark.parametrize(("facts", "updates", "back"), [(8, 4, None), (6, 2, 2), (4, 4, 3), (5, 1, None)])
def test_questions_of_ordered_recall_are_answered_by_the_order_of_the_facts(
    facts: int, updates: int, back: int | None
) -> None:
    settings, tokens, mask = read("ordered_recall", facts=facts, updates=updates, back=back)
    asked_kinds, distances = set(), set()
    for row, asked in zip(tokens, mask, strict=True):
        told: list[tuple[int, int]] = []
        for place, token in enumerate(row.tolist()):
            if place < len(asked) and asked[place]:
                assert row[place + 1] == settings.value(np.array(answer_by_order(settings, told, token)))
                asked_kinds.add((token - 32 - 256 >= 16) + (token - 32 - 256 >= 48))
                distances |= {token - 32 - 256 - 47} if token - 32 - 256 >= 48 else set()
            elif 32 <= token < 32 + 256:
                told.append(divmod(token - 32, 16))
        assert len(told) == facts == asked.sum()
        of_keys = [[value for key, value in told if key == chosen] for chosen in {key for key, _ in told}]
        assert len(of_keys) == facts // updates
        assert all(len(set(values)) == len(values) == updates for values in of_keys), "each key has different values"
    assert asked_kinds == {0, 1, 2} and distances == set(range(1, (back or facts) + 1))
    assert settings.vocab_size == 32 + 256 + 16 + 16 + 16 + (back or facts)


def test_evaluation_asks_for_the_order_of_all_facts() -> None:
    settings = TaskSettings("ordered_recall", updates=4)
    draws = Draws(np.arange(600), 0, "evaluation 100")
    tokens, answers, places, kinds = ordered_question(settings, draws.integers(100, 32), draws)
    for row, answer, place, kind in zip(tokens, answers, places, kinds, strict=True):
        told = [divmod(token - 32, 16) for token in row.tolist() if 32 <= token < 288]
        assert answer == settings.value(np.array(answer_by_order(settings, told, int(row[-1]))))
        assert settings.value(np.array((row[place] - 32) % 16)) == answer, "the place is that of the fact"
        assert QUESTIONS[kind] == ("latest", "first", "back")[int(row[-1] >= 320) + int(row[-1] >= 336)]
    assert (np.bincount(kinds) > 150).all() and set(tokens[kinds == 2, -1]) == set(range(336, 344))


def test_without_the_order_of_the_facts_a_third_or_a_fifth_of_the_guesses_is_right() -> None:
    settings = TaskSettings("ordered_recall", facts=6, updates=3, back=1)
    draws = Draws(np.arange(3000), 0, "evaluation 64")
    tokens, answers, _, kinds = ordered_question(settings, draws.integers(64, 32), draws)
    right: list[list[float]] = [[], [], []]
    for row, answer, kind in zip(tokens, answers - settings.value(np.array(0)), kinds, strict=True):
        told = [divmod(token - 32, 16) for token in row.tolist() if 32 <= token < 288]
        key = (int(row[-1]) - (288, 320, 0)[kind]) if kind < 2 else None
        values = [value for each, value in told if key in (None, each)]
        right[kind].append(values.count(answer) / len(values))
    chances = chances_without_order(6, 3, 16)
    assert set(right[0] + right[1]) == {1 / 3} == {chances["latest"], chances["first"]}
    assert tuple(chances) == QUESTIONS and np.mean(right[2]) == pytest.approx(chances["back"], abs=0.006)


@pytest.mark.parametrize(("task", "step"), [("copy", 1), ("reverse", -1)])
def test_copies_follow_the_separator(task: str, step: int) -> None:
    _, tokens, mask = read(task)
    assert (tokens[:, 32] == 32).all()
    assert (tokens[:, 33:] == tokens[:, :32][:, ::step]).all()
    assert mask[:, 32:].all() and not mask[:, :32].any()


def test_the_last_ngram_occurred_before() -> None:
    _, tokens, mask = read("ngram", ngram=4)
    for row in tokens:
        assert any((row[start : start + 4] == row[-4:]).all() for start in range(65 - 2 * 4 + 1))
    assert mask.sum() == len(tokens) and mask[:, -1].all()


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_seed_split_and_number_alone(task: str) -> None:
    def samples(seed: int, split: str, numbers: np.ndarray) -> np.ndarray:
        updates = 4 if task == "ordered_recall" else None
        return SyntheticSamples(TaskSettings(task, updates=updates), 64, seed, split).read(numbers).tokens

    whole = samples(1, "train", NUMBERS)
    assert (samples(1, "train", NUMBERS[::-1])[::-1] == whole).all()
    assert (samples(1, "train", NUMBERS[7:9]) == whole[7:9]).all()
    assert len(np.unique(whole, axis=0)) == len(whole)
    for other in (samples(2, "train", NUMBERS), samples(1, "valid", NUMBERS)):
        assert (other != whole).any(axis=1).all()


def test_random_numbers_are_uniform_and_columns_differ() -> None:
    draws = Draws(np.arange(4000), 0, "train")
    first, second = draws.uniform(3), draws.uniform(3)
    for column in (*first.T, *second.T):
        assert abs(column.mean() - 0.5) < 0.03 and abs(np.histogram(column, 10, (0, 1))[0] - 400).max() < 100
    correlations = np.corrcoef(np.hstack([first, second]).T) - np.eye(6)
    assert np.abs(correlations).max() < 0.06


def test_the_loss_counts_answers_or_all_tokens() -> None:
    assert SyntheticSamples(TaskSettings(loss="all"), 64, 0).read(NUMBERS).loss_mask is None
    with Loader(SyntheticSamples(TaskSettings(), 64, 0), 8, 4, 0, 1) as loader:
        batches = loader.micro_batches(5)
    assert [batch.loss_mask.sum() for batch in batches if batch.loss_mask is not None] == [32, 32]


def test_a_sample_without_room_is_an_error() -> None:
    with pytest.raises(DataError, match="seq_length: 22 .*task recall; .*at least 23"):
        SyntheticSamples(TaskSettings(), 22, 0)
    assert SyntheticSamples(TaskSettings(), 23, 0).read(NUMBERS).tokens.shape == (300, 24)


def test_a_corpus_of_a_task_needs_no_files_and_sets_the_vocabulary() -> None:
    corpus = open_corpus(load_config([MODEL]))
    assert corpus.config.model.vocab_size == 320 and corpus.tokenizer is None
    assert corpus.valid is not None
    assert (corpus.train.read(NUMBERS).tokens != corpus.valid.read(NUMBERS).tokens).any()
    assert corpus.train.mixture(10)[0].tokens == 640
    other = open_corpus(load_config([MODEL], ["synthetic.facts=4"]))
    assert not differing_data(corpus.identity, corpus.identity, [])
    assert "synthetic task" in differing_data(corpus.identity, other.identity, [])[0]
    with pytest.raises(ConfigError, match="vocab_size: 100, .*task has 320 token"):
        open_corpus(load_config([MODEL], ["vocab_size=100"]))


def write_shard(prefix: Path, documents: int = 40) -> Path:
    """40 documents of 30 to 69 tokens; all tokens of a document are its number."""
    writer = ShardWriter(prefix, 50)
    for number in range(documents):
        writer.add(np.full(30 + number, number))
    writer.finish()
    return prefix


def test_facts_are_mixed_into_text(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "text")
    keys = {name: [str(prefix)] for name in ("train_data_paths", "valid_data_paths", "test_data_paths")}
    task = {"synthetic": {"task": "recall", "facts": 4, "text": True, "filler_tokens": 50, "loss": "all"}}
    config = load_config([MODEL], {**keys, **task})
    corpus = open_corpus(config)
    batch = corpus.train.read(NUMBERS)
    assert batch.loss_mask is None and corpus.config.model.vocab_size == 50 + 288
    assert ((batch.tokens < 50).sum(axis=1) == 65 - 4 * 3).all()
    assert corpus.sources == [str(prefix)] and open_corpus(load_config([MODEL])).sources == []
    saved = corpus.identity
    other = open_corpus(
        load_config([MODEL], {**keys, **task, "train_data_paths": [str(write_shard(tmp_path / "b", 41))]})
    )
    assert not differing_data(saved, corpus.identity, corpus.sources)
    assert f"document count of {tmp_path / 'b'} (saved 40, now 41)" in differing_data(
        saved, other.identity, other.sources
    )
    earlier = {name: value for name, value in saved.items() if name != "text"}  # checkpoints of earlier versions
    assert not differing_data(earlier, other.identity, other.sources)
    narrow = open_corpus(config.override({"synthetic.filler_tokens": 20, "vocab_size": 400}))
    with pytest.raises(DataError, match="filler_tokens: 20 is too small for token id"):
        narrow.train.read(NUMBERS)
    with pytest.raises(ConfigError, match="filler_tokens: 50, .* has 512 tokens; set synthetic.filler_tokens=512"):
        open_corpus(config.override({"tokenizer_type": "CharLevelTokenizer"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("synthetic.facts=17", "17 facts need 17 different keys, but synthetic.keys is 16"),
        ("synthetic.updates=2", "updates has no effect with task recall"),
        ("synthetic={task: ordered_recall}", "set synthetic.updates"),
        ("synthetic={task: ordered_recall, facts: 8, updates: 3}", "8 facts are no multiple of updates=3"),
        ("synthetic={task: ordered_recall, facts: 8, updates: 4, back: 9}", "9 facts back with 8 facts; lower"),
        ("synthetic={task: recall, back: 2}", "back has no effect with task recall"),
        ("synthetic={task: ordered_recall, facts: 8, updates: 1, keys: 4}", "8 different keys are needed"),
        ("synthetic={task: ordered_recall, facts: 8, updates: 8, values: 4}", "8 different values, but there are 4"),
        ("synthetic.task=recal", r"`recal` is not one of recall \| .*mean `recall`"),
        ("train_data_paths=[a]", "not read the data paths .*synthetic.text=true"),
        ("reset_attention_mask=true", "not supported with reset_attention_mask"),
        ("eval_windows=[1L]", "not supported with eval_windows"),
    ],
)
def test_contradictions_are_errors(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([MODEL], [change])
