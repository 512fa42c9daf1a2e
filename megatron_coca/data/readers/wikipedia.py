"""Wikipedia: XML exports of MediaWiki (``pages-articles.xml.bz2``) and the output of WikiExtractor.

A page of an export becomes a row with ``text`` (title, blank line, prose), ``title``, ``key`` (the title) and ``id``.
Of several revisions the last one is used. Redirects, other namespaces, disambiguation pages, pages that are not
wikitext and pages without prose are filtered and counted. The format is described in
https://www.mediawiki.org/wiki/Help:Export. The markup is reduced to prose by regular expressions in linear time; a full
parser (mwparserfromhell) takes quadratic time, or crashes, on the unbalanced markup that dumps contain.
"""

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

from megatron_coca.data.readers.source import Chunk, ReadingProblems, RejectedRecord, Row
from megatron_coca.data.readers.streams import Cut, StreamFormat, decode
from megatron_coca.safe_yaml import read_yaml

MAX_WIKITEXT = 1 << 21
"""Characters of a page. MediaWiki by default stores pages of at most 2 MiB (``$wgMaxArticleSize``)."""
MAX_NESTING = 8
"""Templates and tables nested deeper than this are removed."""

Render = Callable[[Sequence[str]], str]
"""The text of a template, from its positional arguments."""

_RANGES = {"to": "to", "-": "–", "–": "–", "and": "and", "or": "or", "by": "by", "x": "by", "+/-": "±"}
_UNITS = {"sqmi": "square miles", "sqkm": "km²", "km2": "km²", "m2": "m²", "sqft": "square feet", "C": "°C", "F": "°F"}


def _after(prefix: str, arguments: Sequence[str]) -> str:
    return prefix + "".join(arguments[:1])


def _constant(text: str, arguments: Sequence[str]) -> str:
    return text


def _fraction(arguments: Sequence[str]) -> str:
    """``{{frac|1|2}}`` is 1/2, ``{{frac|3|1|2}}`` is 3 1/2, ``{{frac|2}}`` is 1/2."""
    parts = [argument for argument in arguments[:3] if argument]
    whole = [parts[0]] if len(parts) == 3 else []
    return " ".join([*whole, "/".join(["1", *parts] if len(parts) == 1 else parts[-2:])])


def _measure(arguments: Sequence[str]) -> str:
    """``{{convert|5|to|10|km|mi}}`` is "5 to 10 km": the measure as written, without the conversion."""
    shown: list[str] = []
    for argument in arguments:
        if argument in _RANGES:
            shown.append(_RANGES[argument])
        elif re.match(r"[-+−]?[\d.,/]+(e[-+]?\d+)?$", argument):
            shown.append(argument)
        else:
            return " ".join([*shown, _UNITS.get(argument, argument)])
    return " ".join(shown)


def _words(text: str, separator: str | None = None) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(separator))


_WORDS = read_yaml(Path(__file__).with_name("wikitext.yaml"))
_TEMPLATES: tuple[tuple[Render, str], ...] = (
    (lambda arguments: "".join(arguments[1:2]), "lang | langx | rtl-lang | color | colour | font color | fontcolor"),
    (lambda arguments: "".join(arguments[-1:]), "transl | transliteration | translit"),
    (lambda arguments: " ".join(filter(None, arguments)), "sortname | ship"),
    ("".join, "chem | chem2 | ce | gaps"),
    (_fraction, "frac | fraction | sfrac | tfrac"),
    (_measure, "convert | cvt | conv"),
    (lambda arguments: "r. " + "–".join(filter(None, arguments[:2])), "reign | r."),
    *((partial(_after, prefix), names) for prefix, names in _WORDS["templates_before_argument"].items()),
    *((partial(_constant, text), names) for text, names in _WORDS["templates_alone"].items()),
)
TEMPLATES: Mapping[str, Render] = {name: render for render, names in _TEMPLATES for name in _words(names, "|")}
"""Templates that stand for words of a sentence; all others are removed."""

_DISAMBIGUATION_NAMES = "|".join(map(re.escape, sorted(_words(_WORDS["disambiguation"], "|"))))
_DISAMBIGUATION = re.compile(rf"\{{\{{\s*(?:{_DISAMBIGUATION_NAMES})\s*[|}}]", re.IGNORECASE)
_HIDDEN_LINKS = _words(_WORDS["hidden_links"])
_SECTIONS_WITHOUT_PROSE = _words(_WORDS["sections_without_prose"], "|")
_DROPPED_TAGS, _PLAIN_TAGS = _words(_WORDS["dropped_tags"]), _words(_WORDS["plain_tags"])
_LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}|simple|[a-z]{2,4}(?:-[a-z]+)+)$")
# Tags whose content is kept verbatim, and tags that become the start of a line.
_VERBATIM: Mapping[str, Callable[[str], str]] = {
    "nowiki": html.unescape,
    "pre": lambda raw: f"\n{html.unescape(raw)}\n",
    "syntaxhighlight": lambda raw: f"\n{raw}\n",
    "source": lambda raw: f"\n{raw}\n",
    "math": lambda raw: f"${' '.join(raw.split())}$",
    "chem": lambda raw: " ".join(raw.split()),
    "ce": lambda raw: " ".join(raw.split()),
}
_LINE_TAGS = {"br": "\n", "p": "\n\n", "hr": "\n", "li": "\n* ", "dd": "\n", "dt": "\n"}
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)(?:\s[^<>]*|/)?>")
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_PARAMETER = re.compile(r"\{\{\{[^{}]*\}\}\}")
_TABLE = re.compile(r"(?ms)^[ \t:]*\{\|(?:(?!\n[ \t:]*\{\||\n[ \t]*\|\}(?!\})).)*\n[ \t]*\|\}(?!\})")
# Possessive, as every part ends where the next one begins: giving characters back would take quadratic time.
_LINK = re.compile(r"\[\[([^\[\]\n]*+)\]\]|\[(?:https?:|ftp:)?//[^\s\[\]<>]++[ \t]*+([^\[\]\n]*+)\]")
_IN_LINK, _KEPT = "\ue000", "\ue001{}\ue002"  # private use: a | within a link, and text that is not parsed
_KEPT_FOUND = re.compile("\ue001(\\d+)\ue002")
_PRIVATE = re.compile("[\ue000-\ue002]")
_LINES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?m)^-{4,}"), ""),
    (re.compile(r"(?m)^[*#:;]*[*#][ \t]*"), "- "),
    (re.compile(r"(?m)^[:;]+[ \t]*"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"__[^\W\d_a-z]{3,40}__"), ""),  # magic words such as __NOTOC__
)
# What removed templates and tables leave behind. Repeats are bounded, so that a long run cannot take quadratic time.
_REMAINS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[^\S\n]+"), " "),
    (re.compile(r"\( ?[;,:][ ,;:]{0,20}"), "("),
    (re.compile(r"(?<![ ,;:])[ ,;:]{1,20}\)"), ")"),
    (re.compile(r"\( "), "("),
    (re.compile(r" ?\( ?\)"), ""),
    (re.compile(r" (?=[,.](?:\s|$))"), ""),
    (re.compile(r" ?\n ?"), "\n"),
    (re.compile(r"(?m)^(?:\||! |[-–*•]$).*$"), ""),  # rows of a table without end, entries without text
    (re.compile(r"\n{3,}"), "\n\n"),
)


def plain_text(wikitext: str) -> str:
    """Plain prose of one page; empty if it has none. Time is about linear in the length for any markup.

    Raises ``RejectedRecord``, "wikitext too long", for more than ``MAX_WIKITEXT`` characters.
    """
    if len(wikitext) > MAX_WIKITEXT:
        raise RejectedRecord("wikitext too long", f"{len(wikitext):,} characters; at most {MAX_WIKITEXT:,} are read")
    kept: list[str] = []
    text = _remove_nested(_replace_tags(_PRIVATE.sub("", wikitext), kept))
    sections = [(level, _prose(title), _prose(body)) for level, title, body in _sections_with_prose(text)]
    prose = "\n\n".join(_titled(sections))
    return _KEPT_FOUND.sub(lambda number: kept[int(number[1])], prose).strip()


def _replace_tags(text: str, kept: list[str]) -> str:
    """Remove comments and tags; the content of verbatim tags moves to ``kept`` and leaves its number in the text."""
    out: list[str] = []
    at, lower = 0, text.lower() if len(text.lower()) == len(text) else text
    ends: dict[str, int] = {}  # where the search for an end has failed, it fails for every later opening

    def find(end: str, start: int) -> int:
        if start >= ends.get(end, len(text) + 1):
            return -1
        found = lower.find(end, start)
        if found < 0:
            ends[end] = start
        return found

    for mark in re.finditer(r"<!--|" + _TAG.pattern, text):
        if mark.start() < at:
            continue
        out.append(text[at : mark.start()])
        at = mark.end()
        name = (mark[2] or "").lower()
        alone, closing = mark[0].endswith("/>"), bool(mark[1])
        if mark[0] == "<!--":
            end = find("-->", at)
            at = end + 3 if end >= 0 else at
        elif name in _VERBATIM and not alone and not closing:
            end = find(f"</{name}", at)
            if end >= 0:
                out.append(_KEPT.format(len(kept)))
                kept.append(_VERBATIM[name](text[at:end]))
                at = text.find(">", end) + 1 or len(text)
        elif name in _DROPPED_TAGS and not alone and not closing:
            end = find(f"</{name}", at)
            paragraph = find("\n\n", at) if name == "ref" else -1
            if end >= 0 and not 0 <= paragraph < end:
                at = text.find(">", end) + 1 or len(text)
        elif name in _LINE_TAGS:
            out.append("" if closing else _LINE_TAGS[name])
        elif name == "sup" and not closing and re.match(r"[-−+]?\d", text[at : at + 2]):
            out.append("^")  # 10<sup>6</sup> is not 106
        elif name not in _PLAIN_TAGS and name not in _VERBATIM and name not in _DROPPED_TAGS:
            out.append(mark[0])
    out.append(text[at:])
    return "".join(out)


def _remove_nested(text: str) -> str:
    """Replace templates by their text and remove tables, innermost first; marks without a partner are removed."""
    text = re.sub(r"\[\[[^\[\]\n]*+\]\]", lambda link: link[0].replace("|", _IN_LINK), text)
    for _ in range(MAX_NESTING):
        text, templates = _TEMPLATE.subn(_template, _PARAMETER.sub("", text))
        text, tables = _TABLE.subn("\n", text)
        if not templates and not tables:
            break
    out: list[str] = []
    starts: list[int] = []
    at = 0
    for mark in re.finditer(r"\{\{+|\}\}+", text):  # what is nested deeper, or not closed
        out.append(text[at : mark.start()])
        at = mark.end()
        if mark[0][0] == "{":
            starts += [len(out)] * (len(mark[0]) // 2)
        for _ in range(len(mark[0]) // 2 if mark[0][0] == "}" else 0):
            if starts:
                del out[starts.pop() :]
    text = "".join([*out, text[at:]])
    text = re.sub(r"(?m)^[ \t:]*\{\|.*$|^[ \t]*\|\}", "", text)
    return text.replace(_IN_LINK, "|")


def _template(match: re.Match[str]) -> str:
    name, *arguments = match[1].split("|")
    name = name.replace("_", " ").strip().lower()
    render = TEMPLATES.get(name) or (TEMPLATES["lang-"] if name.startswith("lang-") else None)
    if render is None:
        return ""
    positional = [argument for argument in arguments if not re.match(r"\s*[^\d\s=][^=]*=", argument)]
    return render([re.sub(r"^\s*\d+\s*=", "", argument).strip() for argument in positional])


def _sections_with_prose(text: str) -> Iterator[tuple[int, str, str]]:
    """(level, title, body) of each section but reference lists and the like, and what is below those."""
    level, title, skipped, body = 0, "", 0, list[str]()
    for line in [*text.split("\n"), "= end ="]:
        bare = line.strip("= \t") if line.startswith("=") else ""
        ends = line.rstrip()
        depth = min(len(ends) - len(ends.lstrip("=")), len(ends) - len(ends.rstrip("=")), 6) if bare else 0
        if not depth:
            body.append(line)
            continue
        if not skipped:
            yield level, title, "\n".join(body)
        level, title, body = depth, bare, []
        if not skipped or level <= skipped:
            skipped = level if title.strip("'").lower() in _SECTIONS_WITHOUT_PROSE else 0


def _prose(wikitext: str) -> str:
    for pattern, replacement in _LINES:
        wikitext = pattern.sub(replacement, wikitext)
    for _ in range(MAX_NESTING):  # the caption of a file may hold links
        wikitext, links = _LINK.subn(_link, wikitext)
        if not links:
            break
    text = html.unescape(wikitext.replace("[[", "").replace("]]", ""))
    for pattern, replacement in _REMAINS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _link(match: re.Match[str]) -> str:
    """The label of a link; nothing for files, categories and other languages, and for an address without a label."""
    if match[2] is not None:
        return match[2]
    title, *labels = match[1].split("|")
    prefix, colon, rest = title.partition(":")
    hidden = prefix.strip().lower().replace(" ", "_") in _HIDDEN_LINKS
    if colon and (hidden or (rest[:1].strip() and _LANGUAGE_LINK.match(prefix))):
        return ""
    return (labels[-1] if labels else "") or title.removeprefix(":")


def _titled(sections: list[tuple[int, str, str]]) -> Iterator[str]:
    """Titles and bodies in order; a title only if prose follows below it."""
    shown, above = [False] * len(sections), list[int]()
    for number, (level, _, text) in enumerate(sections):
        while above and sections[above[-1]][0] >= level:
            above.pop()
        above.append(number)
        for upper in reversed(above if text else ()):
            if shown[upper]:
                break
            shown[upper] = True
    for (_, title, text), has_prose in zip(sections, shown, strict=True):
        yield from filter(None, (title if has_prose else "", text))


_OPENING, _CLOSING = b"<page>", b"</page>"


def page_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    """(place, row) of every article of an export in a chunk, whose payload is bytes that begin between two pages.

    Faults: "invalid XML" (a page that does not parse, or does not end), "missing field", "wikitext too long".
    """
    *records, rest = chunk.payload.split(_CLOSING)
    for number, record in enumerate(records, start=max(1, chunk.first)):
        place = f"{chunk.path}:{number}"
        _, *pages = record.split(_OPENING)
        for _ in pages[:-1]:
            problems.add(place, "invalid XML", "the page does not end")
        try:
            row = _page_row(pages, problems)
        except RejectedRecord as fault:
            problems.add(place, fault.kind, fault.detail)
            continue
        if row is not None:
            yield place, row
    fault_of_rest = None if records or chunk.first > 1 else "no page in it"
    if _OPENING in rest:
        fault_of_rest = "the page does not end"
    elif rest.strip() and b"<mediawiki" not in rest and b"</mediawiki>" not in rest:
        fault_of_rest = "neither a page nor the head or foot of a MediaWiki export in UTF-8"
    if fault_of_rest is not None:
        problems.add(f"{chunk.path}:{max(1, chunk.first) + len(records)}", "invalid XML", fault_of_rest)


WIKIPEDIA = StreamFormat(Cut((_CLOSING,), _CLOSING), page_rows, ending=b"</mediawiki>")


def _page_row(pages: list[bytes], problems: ReadingProblems) -> Row | None:
    if not pages:
        raise RejectedRecord("invalid XML", "the page does not begin")
    try:
        # A document type cannot follow the first tag, so no entity can be declared, expanded or fetched.
        page = ElementTree.fromstring(_OPENING + pages[-1] + _CLOSING)
    except ElementTree.ParseError as error:
        raise RejectedRecord("invalid XML", str(error)) from error
    title = page.findtext("title", "").strip()
    wikitext = page.findtext("revision[last()]/text")
    if not title or wikitext is None:
        missing = "revision/text" if title else "title"
        raise RejectedRecord("missing field", f"no <{missing}>; the page has {[child.tag for child in page][:8]}")
    namespace = page.findtext("ns", "0").strip()
    model = page.findtext("revision[last()]/model", "wikitext").strip()
    if namespace != "0":
        problems.leave_out(f"namespace {namespace}")
    elif page.find("redirect") is not None or wikitext.lstrip()[:9].upper() == "#REDIRECT":
        problems.leave_out("redirect")
    elif model != "wikitext":
        problems.leave_out(f"content model {model}")
    elif _DISAMBIGUATION.search(wikitext):
        problems.leave_out("disambiguation")
    elif text := plain_text(wikitext):
        return {"text": f"{title}\n\n{text}", "title": title, "key": title, "id": page.findtext("id", "").strip()}
    else:
        problems.leave_out("no prose")
    return None


EXTRACT = "wiki_"
EXTRACT_NAME = re.compile(r"wiki_\d\d+")
_DOC_END = b"</doc>"
_DOC = re.compile(r"(?m)^<doc\b(.*)>[ \t\r]*$")
_BEFORE_DATA = b"\xef\xbb\xbf \t\r\n"


def settled(form: str, blocks: Iterator[bytes]) -> tuple[str, Iterator[bytes]]:
    """The format of a stream, and all its blocks: WikiExtractor writes JSON lines or ``<doc>`` under the same names."""
    if form != EXTRACT:
        return form, blocks
    read = []
    for block in blocks:
        read.append(block)
        if start := block.lstrip(_BEFORE_DATA):
            form = ".jsonl" if start.startswith(b"{") else EXTRACT
            break
    return form, chain(read, blocks)


def extract_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    """(place, row) of every article in ``<doc>`` tags, as WikiExtractor writes them: its ``text``, the attributes of
    its tag, and its title as ``key``.

    Faults: "invalid <doc>", "missing field", "invalid UTF-8". Articles without prose are filtered.
    """
    *records, rest = chunk.payload.split(_DOC_END)
    first = max(1, chunk.first)
    for number, record in enumerate(records, start=first):
        place = f"{chunk.path}:{number}"
        try:
            row = _doc_row(record, place, problems)
        except RejectedRecord as fault:
            problems.add(place, fault.kind, fault.detail)
            continue
        if row["text"] in ("", row["title"]):
            problems.leave_out("no prose")
        else:
            yield place, row
    if rest.strip():
        problems.add(f"{chunk.path}:{first + len(records)}", "invalid <doc>", "it does not end")


WIKI_EXTRACT = StreamFormat(Cut((_DOC_END,), _DOC_END), extract_rows)


def _doc_row(record: bytes, place: str, problems: ReadingProblems) -> Row:
    text = decode(record).removeprefix("\ufeff")
    openings = list(_DOC.finditer(text))
    if not openings:
        raise RejectedRecord("invalid <doc>", "it does not begin")
    if text[: openings[0].start()].strip():
        problems.add(place, "invalid <doc>", "text before it")
    for _ in openings[:-1]:
        problems.add(place, "invalid <doc>", "it does not end")
    # A value ends with the quotation mark before the next attribute: titles may hold quotation marks.
    parts = re.split(r'"\s+(?=\w+=")', openings[-1][1].strip().removesuffix('"'))
    pairs = (part.partition('="') for part in parts)
    attributes = {name: html.unescape(value) for name, mark, value in pairs if mark}
    if not attributes.get("title"):
        raise RejectedRecord("missing field", f"no title; the tag has {sorted(attributes)[:8]}")
    body = text[openings[-1].end() :]
    for escape, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        body = body.replace(escape, character)
    return attributes | {"text": body.strip(), "key": attributes["title"]}
