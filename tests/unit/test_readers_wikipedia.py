"""Wikipedia: the XML export, and wikitext to prose."""

import bz2
import random
import time
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import open_reader, read_documents, wikipedia
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import Chunk, ReadingProblems, SourceSpec
from megatron_coca.data.readers.wikipedia import page_rows, plain_text

HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n<siteinfo>\n'
    '<sitename>Wiki</sitename><namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>\n'
)
FOOT = "</mediawiki>\n"


def page(title: str, text: str, extra: str = "", ns: int = 0, model: str = "wikitext") -> str:
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>{ns}</ns>\n    <id>7</id>\n    {extra}\n    "
        f"<revision>\n      <id>9</id><model>{model}</model>\n"
        f'      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>\n    </revision>\n  </page>\n'
    )


PAGES = [
    page("Ada & Co", "'''Ada''' [[lives]] &amp; works <b>here</b>.<ref>{{cite web|url=x}}</ref>"),
    page("Old", "#REDIRECT [[Ada]]", '<redirect title="Ada" />'),
    page("Talk:Ada", "no", ns=1),
    page("Mercury", "Mercury may be:\n* [[Mercury (planet)]]\n{{disambiguation}}"),
    page("Box", "{{Infobox\n| name = Box\n}}\n[[Category:Boxes]]"),
    page("Data", '{"a": 1}', model="json"),
    page("Old style", "#redirect [[Ada]]"),
    "  <page><title>Broken</title><ns>0</ns><revision><text>a & b</text></revision></page>\n",
    "  <page><ns>0</ns><revision><text>no title</text></revision></page>\n",
    page("Last", "Zürich, 世界."),
]


def rows(payload: str | bytes, first: int = 1) -> tuple[list[tuple[str, dict]], ReadingProblems]:
    problems = ReadingProblems()
    raw = payload.encode() if isinstance(payload, str) else payload
    return list(page_rows(Chunk("w.xml", first, raw, len(raw)), problems)), problems


def test_articles_are_kept_and_the_rest_is_counted_or_named() -> None:
    found, problems = rows(HEAD + "".join(PAGES) + FOOT)
    assert found == [
        ("w.xml:1", {"text": "Ada & Co\n\nAda lives & works here.", "title": "Ada & Co", "key": "Ada & Co", "id": "7"}),
        ("w.xml:10", {"text": "Last\n\nZürich, 世界.", "title": "Last", "key": "Last", "id": "7"}),
    ]
    assert problems.filtered == {
        "redirect": 2,
        "namespace 1": 1,
        "disambiguation": 1,
        "no prose": 1,
        "content model json": 1,
    }
    assert problems.counts == {"invalid XML": 1, "missing field": 1}
    assert problems.named[0].startswith("w.xml:8: invalid XML") and problems.named[1].startswith("w.xml:9: missing")


@pytest.mark.parametrize("at", range(1, len(PAGES)))
def test_a_dump_cut_between_any_two_pages_gives_the_same(at: int) -> None:
    whole, all_problems = rows(HEAD + "".join(PAGES) + FOOT)
    before, problems = rows(HEAD + "".join(PAGES[:at]))
    after, later = rows("".join(PAGES[at:]) + FOOT, first=at + 1)
    problems.merge(later)
    assert before + after == whole and problems == all_problems


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (HEAD + "<page><title>A</title>" + PAGES[9], "w.xml:1: invalid XML (the page does not end)"),
        (HEAD + PAGES[9] + "<page><title>A</title>", "w.xml:2: invalid XML (the page does not end)"),
        (HEAD + PAGES[9] + "<title>A</title></page>", "w.xml:2: invalid XML (the page does not begin)"),
        (HEAD + FOOT, "w.xml:1: invalid XML (no page in it)"),
        ("", "w.xml:1: invalid XML (no page in it)"),
        ("<rss><item>text</item></rss>", "w.xml:1: invalid XML (neither a page"),
        (PAGES[9] + "what is this", "w.xml:2: invalid XML (neither a page"),
        ((HEAD + PAGES[9]).encode("utf-16"), "w.xml:1: invalid XML (neither a page"),
    ],
)
def test_pages_that_are_not_whole_are_faults(raw: str | bytes, fault: str) -> None:
    found, problems = rows(raw)
    assert len(found) == (PAGES[9] in raw if isinstance(raw, str) else 0)
    assert len(problems.named) == 1 and problems.named[0].startswith(fault)


def test_no_entity_is_declared_or_fetched() -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b SYSTEM "file:///etc/passwd">]>'
    inside = f"<page>{bomb}<title>A</title><revision><text>&a;</text></revision></page>"
    outside = f"{bomb}<page><title>A</title><revision><text>&b;</text></revision></page>"
    found, problems = rows(inside + outside)
    assert not found and problems.counts == {"invalid XML": 2}


def test_the_last_revision_counts_and_strictness_is_the_callers() -> None:
    older = "<revision><text>old</text></revision><revision>"
    found, _ = rows(PAGES[9].replace("<revision>", older))
    assert found[0][1]["text"] == "Last\n\nZürich, 世界."
    with pytest.raises(DataError, match="w.xml:1: invalid XML"):
        list(page_rows(Chunk("w.xml", 1, PAGES[7].encode(), 0), ReadingProblems(strict=True)))


@pytest.mark.parametrize("compress", [bytes, bz2.compress])
def test_a_dump_on_the_disk_is_read_by_the_file_reader(tmp_path: Path, compress) -> None:
    path = tmp_path / ("dump.xml" if compress is bytes else "dump.xml.bz2")
    raw = (HEAD + "".join(PAGES) + FOOT).encode()
    middle = raw.index(b"<title>Box")
    # Dumps are published as several bz2 streams one after another.
    path.write_bytes(compress(raw[:middle]) + compress(raw[middle:]))
    reader, problems = open_reader(SourceSpec("wiki", [path])), ReadingProblems()
    documents = [d for u in reader.units() for c in reader.chunks(u) for d in reader.documents(c, problems)]
    assert [(d.key, d.text.splitlines()[0]) for d in documents] == [("Ada & Co", "Ada & Co"), ("Last", "Last")]
    assert sum(problems.counts.values()) == 2


@pytest.mark.parametrize("block", [50, 1 << 20])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (HEAD + PAGES[0] + PAGES[9], 2),  # cut off between two pages
        (HEAD + PAGES[0] + PAGES[9] + FOOT[:-3], 2),
        (HEAD + PAGES[0] + FOOT + HEAD + PAGES[9], 2),
        (HEAD, 0),
        ("", 0),
        ("<rss><item>text</item></rss>", 0),
    ],
)
def test_a_dump_without_its_end_is_an_error_after_what_comes_before(
    tmp_path: Path, content: str, found: int, block: int
) -> None:
    path = tmp_path / "dump.xml"
    path.write_text(content)
    reader, documents, problems = FileReader(SourceSpec("wiki", [path]), block), list[str](), ReadingProblems()
    with pytest.raises(DataError, match="there is no </mediawiki>"):
        for chunk in reader.chunks(reader.units()[0]):
            documents += [document.key for document in reader.documents(chunk, problems)]
    assert documents == ["Ada & Co", "Last"][:found]
    path.write_text(HEAD + "".join(PAGES) + FOOT + " \n\n")
    assert list(reader.chunks(reader.units()[0]))


@pytest.mark.parametrize("name", ["-p1p41242.bz2", "-p41243p151573.BZ2", "-p1p41242"])
def test_a_part_of_a_dump_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"enwiki-20240101-pages-articles1.xml{name}"
    content = (HEAD + PAGES[0] + FOOT).encode()
    path.write_bytes(bz2.compress(content) if name[-1] in "2Z" and "." in name else content)
    assert [document.key for document in read_documents(path)] == ["Ada & Co"]


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("'''Bold''' and ''italic''", "Bold and italic"),
        ("[[a]] [[b|c]] [[:d]] [[e#f|g]]s", "a c d gs"),
        ("x [[File:a.jpg|thumb|of [[b]] and {{c}}]] y [[Category:Z]][[de:Ada]]", "x y"),
        ("see [http://a.b/c the site] or [https://d.e]", "see the site or"),
        ("a<ref name=x>b {{cite|c}}</ref><ref name=x /> d<!-- e\n\n -->f", "a df"),
        ("{| class=x\n|-\n| a || {{b}}\n{|\n| inner\n|}\n|}\nc", "c"),
        ("{{Infobox\n| a = {{b|c}}\n| d = [[e]]\n}}\nf", "f"),
        ("5 &lt; 6 &nbsp;&amp; 7&#8211;8", "5 < 6 & 7–8"),
        ("* a\n** b\n# c\n: d\n; e", "- a\n- b\n- c\nd\ne"),
        ("a<br/>b<gallery>x.jpg</gallery>", "a\nb"),
        ("10<sup>6</sup> H<sub>2</sub>O 1<sup>st</sup>", "10^6 H2O 1st"),
        ("<math>a_{[[b]]}  + c</math> is", "$a_{[[b]]} + c$ is"),
        ("<nowiki>[[a]] ''b''</nowiki>", "[[a]] ''b''"),
        ("<syntaxhighlight lang=c>\n* p = {{0}};\n</syntaxhighlight>", "* p = {{0}};"),
        ("__NOTOC__a", "a"),
        ("Ada ({{IPA-en|x}}; born {{nowrap|1 May}}) and ({{x}}, {{y}}) b", "Ada (born 1 May) and b"),
        ("a b, {{x}}, c {{y}}.", "a b,, c."),
        ("if a < b and c>d, [x] {y} <=", "if a < b and c>d, [x] {y} <="),
        ("= x\n== ", "= x\n=="),
        ("{{{1|a}}}b", "b"),
        ("a\n\n\n\n\nb", "a\n\nb"),
        ("\ue000 0\ue001 a", "0 a"),
    ],
)
def test_wikitext_becomes_prose(markup: str, prose: str) -> None:
    assert plain_text(markup) == prose


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{convert|5|km|mi}}", "5 km"),
        ("{{Convert|5|to|10|sqmi|abbr=on}}", "5 to 10 square miles"),
        ("{{lang|fr|[[mot]]}}", "mot"),
        ("{{lang-fr|''mot''}}", "mot"),
        ("{{transl|ru|ISO|slovo}}", "slovo"),
        ("{{nowrap|1=a = b}}", "a = b"),
        ("{{circa|1900}}", "c. 1900"),
        ("{{frac|3|1|2}} {{frac|2}}", "3 1/2 1/2"),
        ("{{reign|1558|1603}}", "r. 1558–1603"),
        ("a{{spaced_ndash}}b", "a – b"),
        ("Ada{{'s}}", "Ada's"),
        ("{{chem|H|2|O}}", "H2O"),
        ("{{nowrap|{{nowrap|{{circa|{{unknown}}2}}}}}}", "c. 2"),
        ("{{no such template|a}}", ""),
        ("{{nowrap}}{{convert}}{{lang|fr}}", ""),
    ],
)
def test_templates_that_stand_for_words(template: str, words: str) -> None:
    assert plain_text(template) == words


def test_sections_without_prose_go_with_what_is_under_them() -> None:
    text = "Lead.\n== A ==\na\n=== Empty ===\n{{x}}\n== References ==\nr\n=== Deep ===\nd\n== '''B''' ==\n=== C ===\nc"
    assert plain_text(text) == "Lead.\n\nA\n\na\n\nB\n\nC\n\nc"


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ("a {{unclosed b", "a unclosed b"),
        ("a [[unclosed b", "a unclosed b"),
        ("a }} b ]] c", "a b c"),
        ("{{x|[[a|b}} c", "c"),
        ("a <ref>b {{cite|</ref> c", "a c"),
        ("a <ref>b\n\nc", "a b\n\nc"),
        ("a <!-- b", "a b"),
        ("{|\n| row\nprose", "prose"),
        ("a <math>b", "a b"),
        ("[[a\n\nb]] c", "a\n\nb c"),
        ("[[a {{box|b]] c}} d", "a d"),
    ],
)
def test_what_is_left_open_loses_its_mark_only(broken: str, kept: str) -> None:
    assert plain_text(broken) == kept


MARKS = (
    *("{{", "}}", "[[", "]]", "{|\n", "\n|}", "<b>", "<ref>", "<!--", "<nowiki>", "{{a|", "[[a|", "[http://a ", "{{{"),
    *(
        '<div class="',
        "''",
        "\n==a",
        "= ",
        "\n* ",
        "\n;a:",
        "{{nowrap|",
        "&a",
        "a ",
        "\n\n",
        "(",
        " ;",
        "<math>",
        "{",
        "|",
    ),
)


@pytest.mark.parametrize("mark", [*MARKS, "[[a|b]]", "{{nowrap|x}}", "\n== a ==\n"])
@pytest.mark.serial
def test_a_page_of_one_mark_is_read_in_linear_time(mark: str) -> None:
    start = time.perf_counter()
    plain_text((mark * (100_000 // len(mark)))[:100_000])
    assert time.perf_counter() - start < 4  # the parser alone needs minutes for many of these, or crashes


@pytest.mark.serial
def test_a_megabyte_of_braces_and_deep_nesting() -> None:
    start = time.perf_counter()
    assert plain_text("{{" * 500_000) == ""
    assert plain_text("{{nowrap|" * 5000 + "x" + "}}" * 5000) == ""
    assert plain_text("{{nowrap|" * 4 + "x" + "}}" * 4) == "x"
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("mark", ["<nowiki>", "<math>", "<!--", "<ref>", "= "])
@pytest.mark.serial
def test_a_megabyte_of_what_never_ends(mark: str) -> None:
    start = time.perf_counter()
    plain_text(mark * (1_000_000 // len(mark)))  # of "= " the parser alone overflows its stack
    assert time.perf_counter() - start < 4


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the faster of two calls, at least a millisecond."""
    taken = []
    for _ in range(2):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return max(1e-3, min(taken))


@pytest.mark.parametrize(
    ("before", "unit"),
    [
        ("[//", "a"),
        ("[//a", " "),
        ("[//", "{{convert|"),
        ("[//", "----|----("),
        ("''", ":"),
        ("", "=a=\n"),
        ("", "[http://a b"),
        ("", "http://a{{!}}"),
        ("{{lang|a|", "|}}{{lang|a|"),
    ],
)
@pytest.mark.serial
def test_eight_times_the_markup_takes_no_more_than_linear_time(before: str, unit: str) -> None:
    short, long = (before + unit * (size // len(unit)) for size in (4000, 32_000))
    plain_text(short)
    # Linear is 8 times, quadratic 64 times.
    assert seconds(lambda: plain_text(long)) < 24 * seconds(lambda: plain_text(short))


@pytest.mark.serial
def test_titles_take_linear_time() -> None:
    short, long = ([(1, "a", "")] * size for size in (8000, 64_000))
    assert seconds(lambda: list(wikipedia._titled(long))) < 24 * seconds(lambda: list(wikipedia._titled(short)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a " * ((1 << 20) + 1), "w.xml:1: wikitext too long (2,097,154 characters; at most 2,097,152"),
    ],
)
def test_a_page_that_is_too_long_for_the_parser_is_named_and_others_are_read(text: str, fault: str) -> None:
    found, problems = rows(HEAD + page("Long", text) + PAGES[9] + FOOT)
    assert [place for place, _ in found] == ["w.xml:2"] and problems.total == 1
    assert problems.named[0].startswith(fault)


def test_random_markup_never_hangs_or_fails() -> None:
    chosen = random.Random(5)
    start = time.perf_counter()
    for _ in range(60):
        some = [*chosen.sample(MARKS, 5), "}}", "]]", "x"]
        plain_text("".join(chosen.choices(some, k=2000)))
    assert time.perf_counter() - start < 10
