"""Prompts of the retrieval tasks: their text and length, the places of facts, and their dependence on the seed."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from megatron_coca.data import DataError, Tokenizer, load_tokenizer, train_sentencepiece
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.retrieval import cases as tasks
from megatron_coca.evaluation.tasks.retrieval.cases import (
    ADJECTIVES,
    CITIES,
    NOUNS,
    RULER_TASKS,
    RetrievalTask,
    needle,
    ruler,
)
from megatron_coca.evaluation.tasks.retrieval.prompts import (
    FILLER,
    FILLER_BLOCKS,
    FILLER_HAYSTACK,
    Case,
    Draft,
    Haystack,
    Hidden,
    LengthError,
    Text,
    depth_gap,
    fit,
    inner_gap,
    load_haystack,
    uniform_gap,
)
from megatron_coca.evaluation.tasks.retrieval.task import RULER_NAMES

WORDS = "the grass is green and the sky is blue, there is a code of the sun 12 345 again; Here we go. What is it?"
PROSE = Haystack("prose", tuple(f"{WORDS[: 7 + 13 * (number % 8)].strip()} {number}." for number in range(60)))

TASKS: dict[str, RetrievalTask] = {"passkey": tasks.passkey(), "passkey with stub": tasks.passkey(True)}
TASKS |= {f"needle at {depth}": needle(depth, FILLER_HAYSTACK) for depth in (0, 30, 100)}
TASKS |= {f"prose, needle at {depth}": needle(depth, PROSE) for depth in (0, 50)}
TASKS |= {name: ruler(name, FILLER_HAYSTACK) for name in RULER_TASKS}
TASKS |= {f"prose, {name}": ruler(name, PROSE, True) for name in RULER_TASKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = [f"{WORDS} {number * 7919 % 100003}" for number in range(300)]
    train_sentencepiece(lines, 330, folder / "tokenizer.model")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(lines, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["bytes", "SentencePiece", "byte-level BPE"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    arguments = {
        "bytes": ("CharLevelTokenizer",),
        "SentencePiece": ("SPMTokenizer", folder / "tokenizer.model"),
        "byte-level BPE": ("HFTokenizer", folder / "tokenizer.json"),
    }
    return load_tokenizer(*arguments[request.param])


def text_of(case: Case, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(case.prompt.tolist())


LISTING = """\
There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about \
the important information there.
FILLER
The passkey is KEY. Remember it. KEY is the passkey.
FILLER
What is the passkey?"""


@pytest.mark.parametrize("length", [512, 3000])
def test_the_passkey_prompt_is_the_papers_listing(tokenizer: Tokenizer, length: int) -> None:
    block = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    for case in tasks.passkey().make_cases(tokenizer, length, 5, 0):
        lines, (key,) = text_of(case, tokenizer).split("\n"), case.expected
        wanted = LISTING.replace("KEY", key).split("\n")
        assert (lines[0], lines[-3], lines[-1]) == (wanted[0], wanted[2], wanted[4]) and len(lines) == 5
        blocks = []
        for stretch in (lines[1], lines[3]):
            blocks.append(len(stretch.split(block)) - 1)
            assert stretch == " ".join([block] * blocks[-1]) and blocks[-1] > 0, "only whole blocks"
        assert 10000 <= int(key) <= 99999
        longer = "\n".join([*lines[:3], f"{lines[3]} {block}", lines[4]])
        assert len(case.prompt) <= length < len(tokenizer.encode(longer)), "one block more would be too long"
        assert case.facts[0].depth == blocks[0] / sum(blocks)


def test_the_answer_stub_stands_behind_the_question(tokenizer: Tokenizer) -> None:
    (case,) = tasks.passkey(answer_stub=True).make_cases(tokenizer, 512, 1, 0)
    assert text_of(case, tokenizer).endswith("\nWhat is the passkey? The pass key is")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [640, 1531])
def test_prompts_fit_and_are_one_text(name: str, length: int, tokenizer: Tokenizer) -> None:
    for case in TASKS[name].make_cases(tokenizer, length, 3, 1):
        assert len(case.prompt) <= length
        assert tokenizer.encode(text_of(case, tokenizer)) == case.prompt.tolist()


@pytest.mark.parametrize("haystack", [FILLER_HAYSTACK, FILLER_BLOCKS, PROSE], ids=["sentences", "blocks", "prose"])
@pytest.mark.parametrize("length", [300, 512, 777, 2048])
def test_one_sentence_more_would_be_too_long(haystack: Haystack, length: int, tokenizer: Tokenizer) -> None:
    """Against trying every number of sentences."""
    for place in (0.0, 0.31, 0.99):
        draft = Draft("Find it.", haystack, [Hidden(uniform_gap(place), "The code is 12345.")], "What is it?", 3)
        units = fit(draft, tokenizer, length).units
        sizes = [len(tokenizer.encode(draft.build(units + more).text)) for more in range(4)]
        assert sizes[0] <= length < min(sizes[1:])


def test_few_candidates_are_tokenised(folder: Path) -> None:
    tokenizer = load_tokenizer("SPMTokenizer", folder / "tokenizer.model")
    sizes: list[int] = []

    class Counting:
        def encode(self, text: str) -> list[int]:
            sizes.append(len(text))
            return tokenizer.encode(text)

    draft = Draft("Find it.", FILLER_HAYSTACK, [], "What is it?")
    fitted = fit(draft, Counting(), 20000)  # type: ignore[arg-type]
    assert sum(size > len(fitted.text.text) / 2 for size in sizes) <= 3


@pytest.mark.parametrize("name", TASKS)
def test_facts_stand_where_the_case_says(name: str, tokenizer: Tokenizer) -> None:
    for case in TASKS[name].make_cases(tokenizer, 1024, 4, 0):
        assert len(case.facts) == len(case.expected)
        found = [tokenizer.decode(case.prompt[-fact.distance :].tolist()).lstrip() for fact in case.facts]
        starts = {answer for tail in found for answer in case.expected if tail.startswith(answer)}
        assert starts == set(case.expected)
        assert [fact.distance for fact in case.facts] == sorted((fact.distance for fact in case.facts), reverse=True)
        assert all(0 <= fact.depth <= 1 for fact in case.facts)


@pytest.mark.parametrize("depth", [0, 10, 50, 100])
def test_the_needle_is_as_deep_as_asked(depth: int) -> None:
    for case in needle(depth, FILLER_HAYSTACK).make_cases(load_tokenizer("CharLevelTokenizer"), 2048, 5, 0):
        haystack = text_of(case, load_tokenizer("CharLevelTokenizer")).split("\n")[1]
        (code,) = case.expected
        before, after = re.split(rf"The code of \w+ is {code}\.", haystack)
        counts = [part.count(".") for part in (before, after)]
        assert abs(counts[0] - depth / 100 * sum(counts)) <= 0.5
        assert case.facts[0].depth == pytest.approx(depth / 100, abs=0.5 / sum(counts))


def test_places_are_uniform_over_all_gaps() -> None:
    assert [uniform_gap(place)(3) for place in (0, 0.24, 0.26, 0.51, 0.76, 0.9999999)] == [0, 0, 1, 2, 3, 3]
    assert [inner_gap(place)(3) for place in (0, 0.49, 0.51, 0.9999999)] == [1, 1, 2, 2]
    assert [inner_gap(0.5)(units) for units in (0, 1, 2)] == [0, 1, 1]
    assert [depth_gap(depth)(10) for depth in (0, 0.34, 0.5, 1)] == [0, 3, 5, 10]
    cases = tasks.passkey().make_cases(load_tokenizer("CharLevelTokenizer"), 4096, 400, 0)
    counts = Counter(int(case.facts[0].depth * 3.999) for case in cases)
    assert all(70 < counts[quarter] < 130 for quarter in range(4)), counts
    assert len({case.expected for case in cases}) > 395


@pytest.mark.parametrize("name", TASKS)
def test_a_case_depends_only_on_its_seed_length_and_number(name: str) -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    make: Callable[..., list[Case]] = TASKS[name].make_cases
    several = make(tokenizer, 1024, 6, 5)
    make(tokenizer, 4096, 2, 5)
    again = make(tokenizer, 1024, 3, 5)
    assert [case.prompt.tolist() for case in again] == [case.prompt.tolist() for case in several[:3]]
    assert [case.number for case in several] == list(range(6))
    assert len({case.prompt.tobytes() for case in several}) == 6
    other = make(tokenizer, 1024, 3, 6)
    assert all(one.expected != two.expected for one, two in zip(again, other, strict=True)), "the seed does count"


def test_the_cases_do_not_change() -> None:
    """Published figures rest on these very cases; a change here is a new measurement."""
    tokenizer = load_tokenizer("CharLevelTokenizer")
    drawn = {name: TASKS[name].make_cases(tokenizer, 640, 1, 0)[0] for name in sorted(TASKS)}
    assert {name: (case.expected[0], len(case.prompt)) for name, case in drawn.items()} == DRAWN


DRAWN: dict[str, tuple[str, int]] = {
    "multi_key": ("8211013", 639),
    "multi_query": ("8109144", 635),
    "multi_value": ("2949034", 631),
    "needle at 0": ("1279211", 635),
    "needle at 100": ("2277004", 639),
    "needle at 30": ("5344313", 639),
    "passkey": ("74478", 586),
    "passkey with stub": ("74478", 602),
    "prose, multi_key": ("8211013", 585),
    "prose, multi_query": ("8109144", 592),
    "prose, multi_value": ("2949034", 633),
    "prose, needle at 0": ("1279211", 622),
    "prose, needle at 50": ("1301902", 618),
    "prose, variable_tracking": ("KQBT", 629),
    "variable_tracking": ("KQBT", 623),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_length_without_room_says_how_much_is_needed(name: str) -> None:
    with pytest.raises(LengthError, match=r"length 60: the prompt has \d+ tokens even without filler"):
        TASKS[name].make_cases(load_tokenizer("CharLevelTokenizer"), 60, 1, 0)
    assert issubclass(LengthError, EvaluationError)


def test_the_command_line_knows_every_task() -> None:
    assert tuple(RULER_TASKS) == RULER_NAMES


def test_variables_are_tracked_as_expected() -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    for length in (512, 640, 4096):
        for case in ruler("variable_tracking", PROSE).make_cases(tokenizer, length, 4, 0):
            text, values = text_of(case, tokenizer), dict[str, str]()
            for name, source in re.findall(r"Let ([A-Z]{4}) = (\w+)\.", text):
                values[name] = values.get(source, source)
            (asked,) = re.findall(r"have the value (\d+)\?", text)
            assert {name for name, value in values.items() if value == asked} == set(case.expected)
            assert len(values) > len(case.expected), "there are variables with other values"
            assert all(value.isdigit() for value in values.values()), "each is given the one before it"


@pytest.mark.parametrize(("length", "others"), [(512, 4), (2048, 16), (8192, 32)])
def test_distractors_grow_with_the_length(length: int, others: int) -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    for case in ruler("multi_key", FILLER_HAYSTACK).make_cases(tokenizer, length, 3, 0):
        text = text_of(case, tokenizer)
        codes = dict(re.findall(r"The code of the ([\w-]+) is (\d{7})\.", text))
        (asked,) = re.findall(r"What is the code of the ([\w-]+)\?", text)
        assert len(codes) == 1 + others and (codes[asked],) == case.expected


@pytest.mark.parametrize("name", ["multi_value", "multi_query"])
def test_all_that_is_asked_for_is_there(name: str) -> None:
    tokenizer = load_tokenizer("CharLevelTokenizer")
    for case in ruler(name, FILLER_HAYSTACK).make_cases(tokenizer, 1024, 3, 0):
        text = text_of(case, tokenizer)
        context, question = text.rsplit("\n", 1)
        asked = set(re.findall(r"the ([a-z]+-[a-z]+)", question))
        codes = {code for key, code in re.findall(r"The code of the ([\w-]+) is (\d{7})\.", context) if key in asked}
        assert codes == set(case.expected) and len(codes) == 4


def test_no_word_is_found_in_another() -> None:
    assert not [(one, two) for one in ADJECTIVES for two in ADJECTIVES if one != two and two.endswith(one)]
    assert not [(one, two) for one in NOUNS for two in NOUNS if one != two and two.startswith(one)]
    assert all(len(set(words)) == len(words) for words in (ADJECTIVES, NOUNS, CITIES))


def test_a_haystack_is_read_in_sentences(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("It was the best of\ntimes. It was the worst!  Was it?\n\nA heading\n\n" + "word " * 100)
    haystack = load_haystack([str(path)], tmp_path)
    assert haystack.sentences[:4] == ("It was the best of times.", "It was the worst!", "Was it?", "A heading")
    assert [len(sentence) for sentence in haystack.sentences[4:]] == [299, 199], (
        "text without an end is cut between words"
    )
    assert (haystack.record().sentences, haystack.restarts) == (6, False)
    assert load_haystack(None, tmp_path).sentences == FILLER
    path.write_text("\n")
    with pytest.raises(DataError, match="empty text"):
        load_haystack([str(path)], tmp_path)
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(EvaluationError, match="none.jsonl: has no text"):
        load_haystack([str(tmp_path / "none.jsonl")], tmp_path)


@pytest.mark.parametrize("long", [2, 6])
def test_sentences_of_very_different_lengths_take_few_tries(long: int) -> None:
    """A prompt of short sentences up to a point and long ones from there on, or the other way round."""
    tokenizer, short = load_tokenizer("CharLevelTokenizer"), ["x."] * 200
    for sentences in ((*short, *["x" * 50 * long + "."] * 200), (*["x" * 50 * long + "."] * 5, *short)):
        tried: list[int] = []

        class Counting(Draft):
            def build(self, units: int) -> Text:
                tried.append(units)  # noqa: B023
                return super().build(units)

        draft = Counting("Find it.", Haystack("", sentences), [], "What is it?")
        units = fit(draft, tokenizer, 3000).units
        sizes = [len(tokenizer.encode(Draft.build(draft, units + more).text)) for more in (0, 1)]
        assert sizes[0] <= 3000 < sizes[1] and len(tried) <= 20, tried
