"""Wikipedia as it is distributed: XML exports of MediaWiki (``pages-articles.xml.bz2``).

A page becomes a row with ``text`` (title, blank line, prose), ``title``, ``key`` (the title) and ``id``. Of a page with
several revisions the last one counts. Redirects, other namespaces, disambiguation pages, pages that are not wikitext
and pages without prose are left out, and counted.

The format is described in https://www.mediawiki.org/wiki/Help:Export.
"""

import functools
import html
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, ClassVar
from xml.etree import ElementTree

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import Chunk, ReadingProblems, RejectedRecord, Row
from megatron_coca.data.readers.streams import decode

Arguments = Sequence[str]
"""Positional arguments of a template, as plain text."""

_RANGES = {"to": "to", "-": "–", "–": "–", "and": "and", "or": "or", "by": "by", "x": "by", "+/-": "±"}
_UNITS = {"sqmi": "square miles", "sqkm": "km²", "km2": "km²", "m2": "m²", "sqft": "square feet", "C": "°C", "F": "°F"}


def first(arguments: Arguments) -> str:
    """``{{nowrap|a b}}``: the first argument."""
    return arguments[0] if arguments else ""


def second(arguments: Arguments) -> str:
    """``{{lang|fr|mot}}``: the second argument."""
    return arguments[1] if len(arguments) > 1 else ""


def last(arguments: Arguments) -> str:
    """``{{transl|ru|ISO|slovo}}``: the last argument."""
    return arguments[-1] if arguments else ""


def words(arguments: Arguments) -> str:
    """``{{sortname|Ada|Lovelace}}``: all arguments, as words."""
    return " ".join(filter(None, arguments))


def joined(arguments: Arguments) -> str:
    """``{{chem|H|2|O}}``: all arguments, as one word."""
    return "".join(arguments)


def constant(text: str) -> Callable[[Arguments], str]:
    """``{{ndash}}``: a sign."""
    return lambda arguments: text


def before(prefix: str) -> Callable[[Arguments], str]:
    """``{{circa|1900}}``: the first argument behind a ``prefix``."""
    return lambda arguments: prefix + first(arguments)


def fraction(arguments: Arguments) -> str:
    """``{{frac|1|2}}`` is 1/2, ``{{frac|3|1|2}}`` is 3 1/2, ``{{frac|2}}`` is 1/2."""
    parts = [argument for argument in arguments[:3] if argument]
    whole = [parts[0]] if len(parts) == 3 else []
    return " ".join([*whole, "/".join(["1", *parts] if len(parts) == 1 else parts[-2:])])


def measure(arguments: Arguments) -> str:
    """``{{convert|5|to|10|km|mi}}`` is "5 to 10 km": the measure as the author gave it, without the conversion."""
    shown: list[str] = []
    for argument in arguments:
        if argument in _RANGES:
            shown.append(_RANGES[argument])
        elif re.match(r"[-+−]?[\d.,/]+(e[-+]?\d+)?$", argument):
            shown.append(argument)
        else:
            return " ".join([*shown, _UNITS.get(argument, argument)])
    return " ".join(shown)


def span(prefix: str) -> Callable[[Arguments], str]:
    """``{{reign|1558|1603}}``: from the first to the second argument, behind a ``prefix``."""
    return lambda arguments: prefix + "–".join(filter(None, arguments[:2]))


_ROWS: tuple[tuple[Callable[[Arguments], str], str], ...] = (
    (
        first,
        "nowrap|nobr|nobreak|nbr|small|smaller|big|bigger|larger|large|em|strong|bold|italic|italics|i|b|u|var|mvar|"
        "math|bigmath|sic|typo|not a typo|as written|proper name|abbr|tooltip|smallcaps|sc|allcaps|val|num|flag|"
        "flagcountry|flagu|ill|interlanguage link|interlanguage link multi|ill2|script|unicode|polytonic|hebrew|"
        "arabic|script/hebrew|respell|visible anchor|vanchor|quote|blockquote|bquote|cquote|quotation|rquote|code|"
        "kbd|samp|tt|key|keypress|mono|nihongo|text|poem|poemquote|linktext|no italic|noitalic|ruby|center|centre",
    ),
    (second, "lang|langx|rtl-lang|color|colour|font color|fontcolor"),
    (last, "transl|transliteration|translit"),
    (words, "sortname|ship"),
    (joined, "chem|chem2|ce|gaps"),
    (fraction, "frac|fraction|sfrac|tfrac"),
    (measure, "convert|cvt|conv"),
    (before("c. "), "circa|c.|ca.|ca"),
    (before("fl. "), "floruit|fl.|fl"),
    (before("born "), "born|b."),
    (before("died "), "died|d."),
    (before("As of "), "as of"),
    (before("HMS "), "hms"),
    (before("USS "), "uss"),
    (before("US$"), "us$|usd"),
    (before("£"), "gbp|£|pound sterling"),
    (before("€"), "eur|€|euro"),
    (before("₹"), "inr|₹|indian rupee"),
    (before("¥"), "jpy|cny|¥|yen"),
    (before("10^"), "e|10^"),
    (before("√"), "sqrt|radical|surd"),
    (span("r. "), "reign|r."),
    (constant(" – "), "snd|spnd|spaced ndash|spaced en dash|dash"),
    (constant("–"), "ndash|en dash|endash|nsndns"),
    (constant("—"), "mdash|em dash|emdash"),
    (constant(" "), "nbsp|space|spaces|thinsp|thin space|hairsp|hsp|indent|pad|clear space|nbs"),
    (constant(" · "), "·|dot|middot|•|bullet|bull"),
    (constant("'"), "'|apostrophe"),
    (constant('"'), '"'),
    (constant("|"), "!|pipe|vert"),
    (constant("="), "=|equals"),
    (constant("°"), "deg|degree"),
    (constant("×"), "times|x times"),
    (constant("−"), "minus|negative"),
    (constant("±"), "±|plusminus|plus minus"),
    (constant("π"), "pi"),
    (constant("'s"), "'s"),
    (constant("♯"), "sharp|music sharp"),
    (constant("♭"), "flat|music flat"),
)
INLINE: Mapping[str, Callable[[Arguments], str]] = {
    name: render for render, names in _ROWS for name in names.split("|")
}
_PREFIXES: Mapping[str, Callable[[Arguments], str]] = {"lang-": first}  # {{lang-fr|mot}}


def renderer(name: str) -> Callable[[Arguments], str] | None:
    """What gives the words of the template ``name``; None where it has none."""
    normal = name.replace("_", " ").strip().lower()
    found = INLINE.get(normal)
    if found is None:
        found = next((render for prefix, render in _PREFIXES.items() if normal.startswith(prefix)), None)
    return found


_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig(?:uation|ua)?|disamb|dab|hndis|geodis|surname|given name|human name disambiguation|"
    r"place name disambiguation|mathematical disambiguation|school disambiguation|begriffsklärung|homonymie|"
    r"desambiguación|desambig|desambiguação|неоднозначность|многозначность|пояснение|ujednoznacznienie|dp|aimai)"
    r"\s*[|}]",
    re.IGNORECASE,
)


def is_disambiguation(wikitext: str) -> bool:
    """Whether a page only tells namesakes apart: a list of links, by one of the templates that say so."""
    return _DISAMBIGUATION.search(wikitext) is not None


MAX_NESTING = 8
_RAW_MARK = "\ue000{}\ue001"  # private use: what may not be parsed is put aside and comes back under its number
_RAW_FOUND = re.compile("\ue000(\\d+)\ue001")
_STRAY = {"<": "\ue002", "[": "\ue003", "=": "\ue004", "{": "\ue005"}
_PRIVATE = re.compile("[\ue000-\ue005]")
# Every alternative begins with a literal, which lets the search skip to those: three times as fast as named groups.
_MARK = re.compile(
    r"<!--|</?[A-Za-z][A-Za-z0-9]*(?:\s[^<>]*|/)?>|<"
    r"|\{\{\{(?!\{)|\{\{|\[\[|\n[ \t:]*\{\|"
    r"|\}\}\}(?!\})|\}\}|\]\]|\n[ \t]*\|\}(?!\})"
    r"|\n(?=\n)|\[|\{"
)
_CLOSES = {"}}": "{{", "}}}": "{{{", "]]": "[[", "|}": "{|"}
# Files and categories in the largest editions, beside the English names that work in all of them.
_UNSEEN_WORDS = (
    "file image category media datei bild kategorie fichier catégorie archivo imagen categoría immagine categoria "
    "ficheiro imagem bestand afbeelding categorie plik grafika kategoria файл изображение категория зображення "
    "категорія картинка fil kategori soubor ファイル 画像 カテゴリ 文件 檔案 图像 分类 分類 "
    "tập_tin thể_loại ملف صورة تصنيف קובץ קטגוריה dosya resim kategori fájl kép kategória fișier imagine"
)
_UNSEEN_LINKS = frozenset(_UNSEEN_WORDS.split())
_LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}|simple|[a-z]{2,4}(?:-[a-z]+)+)$")
_DROPPED_WORDS = (
    "ref references gallery timeline score imagemap templatedata templatestyles graph hiero inputbox categorytree "
    "mapframe maplink table style script del includeonly indicator"
)
_DROPPED_TAGS = frozenset(_DROPPED_WORDS.split())
_LINE_TAGS: Mapping[str, str] = {"br": "\n", "p": "\n\n", "hr": "\n", "li": "\n* ", "dd": "\n", "dt": "\n"}
_PLAIN_WORDS = (
    "a abbr b bdi bdo big blockquote center cite code data dfn div dl em font h1 h2 h3 h4 h5 h6 i ins kbd mark "
    "noinclude ol onlyinclude poem q rb rp rt ruby s samp section small span strike strong sub sup time tr td th tt u "
    "ul var wbr caption nobr noindex langconvert"
)
_PLAIN_TAGS = frozenset(_PLAIN_WORDS.split())
_RAW_TAGS: Mapping[str, Callable[[str], str]] = {
    "nowiki": html.unescape,
    "pre": lambda raw: f"\n{html.unescape(raw)}\n",
    "syntaxhighlight": lambda raw: f"\n{raw}\n",
    "source": lambda raw: f"\n{raw}\n",
    "math": lambda raw: f"${' '.join(raw.split())}$",
    "chem": lambda raw: " ".join(raw.split()),
    "ce": lambda raw: " ".join(raw.split()),
}
_RAW_ENDS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _RAW_TAGS} | {"!--": re.compile("-->")}
# Possessive, as every part ends where the next one may begin: one that gave characters back would try each division.
_EXTERNAL_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\[\]<>]++[ \t]*+([^\[\]\n]*+)\]")
_EXPONENT = re.compile(r"<sup>(?=[-−+]?\d)", re.IGNORECASE)  # 10<sup>6</sup> is not 106


@dataclass(slots=True)
class _Open:
    kind: str
    index: int  # of its mark in the output
    height: int = 0  # of what is nested in it and kept


class _Scan:
    """The state of one pass: what was put out, and what is open."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.out: list[str] = []
        self.raw: list[str] = []
        self._open: list[_Open] = []
        self._kinds: Counter[str] = Counter()
        self._endless: set[str] = set()

    def run(self) -> str:
        """Put out the whole text, and remove the marks still open at its end."""
        at = 0
        while match := _MARK.search(self.text, at):
            if match.start() > at:
                self.out.append(self.text[at : match.start()])
            at = _HANDLERS.get(match.group().strip(" \t:\n"), _Scan.tag)(self, match)
        self.out.append(self.text[at:])
        while self._open:
            self._forget()
        return "".join(self.out)

    def open(self, match: re.Match[str]) -> int:
        """Open a template, a link or a table."""
        mark = match.group().lstrip(" \t:\n")
        if mark == "{|":
            self.out.append("\n")
        self._push(mark, mark)
        return match.end()

    def close(self, match: re.Match[str]) -> int:
        """Close the innermost of its kind. A link does not reach over the edge of a template."""
        mark = match.group().lstrip(" \t\n")
        kind = _CLOSES[mark]
        if self._kinds[kind] and (kind != "[[" or self._open[-1].kind == "[["):
            self._pop(kind, mark)
        return match.end()

    def tag(self, match: re.Match[str]) -> int:
        """A tag becomes a line break, nothing, or the edge of what is dropped; an unknown one is text."""
        mark = match.group()
        closing, alone = mark.startswith("</"), mark.endswith("/>")
        name = mark.strip("</>").split(maxsplit=1)[0].rstrip("/").lower()
        if name in _RAW_TAGS:
            return match.end() if closing or alone else self._put_aside(name, match.end())
        if name in _DROPPED_TAGS:
            self._dropped_tag(name, closing, alone)
        elif name in _LINE_TAGS:
            self.out.append("" if closing else _LINE_TAGS[name])
        elif name not in _PLAIN_TAGS:
            self.out.append(_STRAY["<"])
            return match.start() + 1
        return match.end()

    def comment(self, match: re.Match[str]) -> int:
        """Jump over a comment; one that never ends loses its mark only."""
        return self._end_of("!--", match.end())[1]

    def paragraph(self, match: re.Match[str]) -> int:
        """A link ends with its paragraph at the latest."""
        while self._open and self._open[-1].kind == "[[":
            self._forget()
        self.out.append("\n")
        return match.end()

    def stray(self, match: re.Match[str]) -> int:
        """A sign that opens nothing, hidden from the parser."""
        self.out.append(_STRAY[match.group()])
        return match.end()

    def _push(self, kind: str, mark: str) -> None:
        self._open.append(_Open(kind, len(self.out)))
        self._kinds[kind] += 1
        self.out.append(mark)

    def _forget(self) -> _Open:
        """Remove the innermost mark from what is open, and from the output."""
        frame = self._open.pop()
        self._kinds[frame.kind] -= 1
        self.out[frame.index] = ""
        if self._open:
            self._open[-1].height = max(self._open[-1].height, frame.height)
        return frame

    def _pop(self, kind: str, mark: str) -> None:
        while (frame := self._forget()).kind != kind:
            pass
        name = self.out[frame.index + 1] if frame.index + 1 < len(self.out) else ""
        if frame.height >= MAX_NESTING or not _KEPT.get(kind, _never)(name):
            del self.out[frame.index :]
            return
        self.out[frame.index] = kind
        self.out.append(mark)
        if self._open:
            self._open[-1].height = max(self._open[-1].height, frame.height + 1)

    def _dropped_tag(self, name: str, closing: bool, alone: bool) -> None:
        if closing and self._kinds[name]:
            self._pop(name, "")
        elif not closing and not alone:
            if name == "ref" and self._open and self._open[-1].kind == "ref":
                self._forget()  # references do not nest: the one before was never closed
            self._push(name, "")

    def _end_of(self, name: str, at: int) -> tuple[int, int]:
        """(end of the content, end of the closing mark) of what cannot nest; ``at`` twice where it never ends."""
        end = None if name in self._endless else _RAW_ENDS[name].search(self.text, at)
        if end is None:
            self._endless.add(name)  # nor does any later one: searched for once
            return at, at
        return end.span()

    def _put_aside(self, name: str, at: int) -> int:
        end, after = self._end_of(name, at)
        if after > at:
            self.out.append(_RAW_MARK.format(len(self.raw)))
            self.raw.append(_RAW_TAGS[name](self.text[at:end]))
        return after


def _never(name: str) -> bool:
    return False


def _is_seen(target: str) -> bool:
    prefix, colon, rest = target.partition(":")
    name = prefix.strip().lower().replace(" ", "_")
    return not colon or not (name in _UNSEEN_LINKS or (rest[:1].strip() and _LANGUAGE_LINK.match(prefix)))


_KEPT: Mapping[str, Callable[[str], bool]] = {
    "{{": lambda name: renderer(name.partition("|")[0]) is not None,
    "[[": _is_seen,
}
_HANDLERS: Mapping[str, Callable[[_Scan, re.Match[str]], int]] = {
    "<!--": _Scan.comment,
    **dict.fromkeys(("{{", "{{{", "[[", "{|"), _Scan.open),
    **dict.fromkeys(_CLOSES, _Scan.close),
    "": _Scan.paragraph,
    **dict.fromkeys(("<", "[", "{"), _Scan.stray),
}


def cut(wikitext: str) -> tuple[str, list[str]]:
    """(well-formed wikitext of the prose, what was put aside in it); in time linear in the length."""
    text = _EXTERNAL_LINK.sub(r"\1", _PRIVATE.sub("", wikitext))
    scan = _Scan("\n" + _EXPONENT.sub("^", text))  # a table is known by the line break before it
    return scan.run(), scan.raw


def hide_equals(text: str) -> str:
    """Hide the "=" that begin a line: at each the parser descends one level deeper, until its stack overflows."""
    return re.sub(r"(?m)^=", _STRAY["="], text)


def restore(text: str, raw: list[str]) -> str:
    """Put back what ``cut`` put aside."""
    for sign, hidden in _STRAY.items():
        text = text.replace(hidden, sign)
    return _RAW_FOUND.sub(lambda match: raw[int(match[1])], text)


# Sections that list where something comes from or where to go on, by their titles in lower case.
_PROSELESS = frozenset(
    (
        *(
            "references",
            "external links",
            "see also",
            "further reading",
            "notes",
            "bibliography",
            "sources",
            "footnotes",
        ),
        *("notes and references", "references and notes", "citations", "works cited", "gallery", "general references"),
        *("einzelnachweise", "weblinks", "literatur", "siehe auch", "belege", "anmerkungen", "quellen"),
        *("références", "notes et références", "liens externes", "voir aussi", "bibliographie", "articles connexes"),
        *("referencias", "enlaces externos", "véase también", "bibliografía", "notas", "note", "voci correlate"),
        *("collegamenti esterni", "altri progetti", "bibliografia", "ligações externas", "referências", "ver também"),
        *("примечания", "ссылки", "литература", "см. также", "источники", "przypisy", "linki zewnętrzne"),
        *("zobacz też", "externe links", "zie ook", "bronnen, noten en/of referenties", "referenser", "externa länkar"),
        *(
            "脚注",
            "注釈",
            "出典",
            "参考文献",
            "関連項目",
            "外部リンク",
            "参见",
            "參見",
            "外部链接",
            "外部連結",
            "参考资料",
        ),
    )
)
_LINES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?m)^-{4,}"), ""),
    (re.compile(r"(?m)^[*#:;]*[*#][ \t]*"), "- "),
    (re.compile(r"(?m)^[:;]+[ \t]*"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"__[^\W\d_a-z]{3,40}__"), ""),  # magic words such as __NOTOC__
    (re.compile(r"(?m)^[*#:;]+"), ""),  # marks of lists behind those: the parser makes an object of every one
)
MAX_WIKITEXT = 1 << 21
"""Characters of a page. MediaWiki by default stores pages of at most 2 MiB (``$wgMaxArticleSize``)."""
_PARSED, _PARSED_MOST = 1 << 16, 1 << 18
_BOUNDARY = re.compile(r"\{\{|\[\[|\}\}|\]\]|\s")
# What templates and tables leave behind. Repeats are bounded, so that a long run cannot cost its square.
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


@dataclass(frozen=True, slots=True)
class _Section:
    level: int
    title: str
    body: str


@functools.cache
def _parser() -> ModuleType:
    try:
        import mwparserfromhell
    except ImportError as error:
        raise DataError(
            "Wikipedia dumps need mwparserfromhell, which is missing. pip install mwparserfromhell"
        ) from error
    return mwparserfromhell


def _heading(line: str) -> tuple[int, str] | None:
    """(level, title) of a line such as ``== Title ==``."""
    if not line.startswith("="):
        return None
    line = line.rstrip()
    bare = line.strip("=")
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    return (level, bare.strip()) if level and bare.strip() else None


def _sections(text: str) -> Iterator[_Section]:
    level, title, body = 0, "", list[str]()
    for line in text.split("\n"):
        heading = _heading(line)
        if heading is None:
            body.append(line)
        else:
            yield _Section(level, title, "\n".join(body))
            (level, title), body = heading, []
    yield _Section(level, title, "\n".join(body))


def _wanted(sections: Iterator[_Section]) -> Iterator[_Section]:
    """Without the sections that hold no prose, and what stands under them."""
    below: int | None = None
    for section in sections:
        if below is not None and section.level > below:
            continue
        below = section.level if section.title.strip("'").lower() in _PROSELESS else None
        if below is None:
            yield section


def _template(node: Any) -> str:
    render = renderer(str(node.name))
    if render is None:
        return ""
    positional = (p for p in node.params if not p.showkey or str(p.name).strip().isdigit())
    return render([_plain(p.value).strip() for p in positional])


def _link(node: Any) -> str:
    label = "" if node.text is None else _plain(node.text)
    return label or _plain(node.title).removeprefix(":")


_NODES: Mapping[str, Callable[[Any], str]] = {
    "Text": lambda node: node.value,
    "Wikilink": _link,
    "Template": _template,
    "HTMLEntity": lambda node: node.normalize() or "",
    "ExternalLink": lambda node: str(node.url) if node.title is None else _plain(node.title),
    "Tag": lambda node: "" if node.contents is None else _plain(node.contents),
    "Heading": lambda node: _plain(node.title),
}


def _plain(code: Any) -> str:
    """The text of a parsed stretch. What has no row in ``_NODES`` (comments, parameters) is not seen by a reader."""
    return "".join(_NODES[kind](node) for node in code.nodes if (kind := type(node).__name__) in _NODES)


def _parsed_parts(wikitext: str) -> Iterator[str]:
    """Parts of about ``_PARSED`` characters, each of which the parser reads as it would within the whole: they begin
    with white space outside templates and links. So its time and memory grow with the length of a part only.

    Raises ``RejectedRecord`` where more than ``_PARSED_MOST`` characters cannot be divided.
    """
    begin, depth = 0, 0
    for mark in _BOUNDARY.finditer(wikitext) if len(wikitext) > _PARSED else ():
        if mark.group() in ("{{", "[["):
            depth += 1
        elif mark.group() in ("}}", "]]"):
            depth = max(0, depth - 1)
        elif not depth and mark.start() - begin >= _PARSED:
            yield _checked_part(wikitext[begin : mark.start()])
            begin = mark.start()
    yield _checked_part(wikitext[begin:])


def _checked_part(part: str) -> str:
    if len(part) > _PARSED_MOST:
        raise RejectedRecord("wikitext not parsed", f"{len(part):,} characters in one template, link or word")
    return part


def _prose(wikitext: str) -> str:
    for pattern, replacement in _LINES:
        wikitext = pattern.sub(replacement, wikitext)
    parse = functools.partial(_parser().parse, skip_style_tags=True)
    text = "".join(_plain(parse(part)) for part in _parsed_parts(hide_equals(wikitext)))
    for pattern, replacement in _REMAINS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _titled(sections: list[tuple[int, str, str]]) -> Iterator[str]:
    """The parts of the article in order; a title only where prose follows under it."""
    shown, above = [False] * len(sections), list[int]()
    for number, (level, _, text) in enumerate(sections):
        while above and sections[above[-1]][0] >= level:
            above.pop()
        above.append(number)
        for upper in above if text else ():
            shown[upper] = True
    for (_, title, text), has_prose in zip(sections, shown, strict=True):
        if title and has_prose:
            yield title
        if text:
            yield text


def plain_text(wikitext: str) -> str:
    """Plain prose of one page; empty where it has none. In time about linear in the length, whatever the markup.

    Raises:
        RejectedRecord: "wikitext too long" for more than ``MAX_WIKITEXT`` characters; "wikitext not parsed", where
            mwparserfromhell gives up or is not given a part that is too long for it.
        DataError: mwparserfromhell is not installed.
    """
    if len(wikitext) > MAX_WIKITEXT:
        raise RejectedRecord("wikitext too long", f"{len(wikitext):,} characters; at most {MAX_WIKITEXT:,} are read")
    text, raw = cut(wikitext)
    try:
        sections = [(s.level, _prose(s.title), _prose(s.body)) for s in _wanted(_sections(text))]
    except (_parser().parser.ParserError, RecursionError) as error:
        raise RejectedRecord("wikitext not parsed", str(error)) from error
    return restore("\n\n".join(_titled(sections)), raw).strip()


_OPENING, _CLOSING = b"<page>", b"</page>"


def _unwanted(page: ElementTree.Element, wikitext: str) -> str | None:
    """Why a sound page is not wanted; None where it is."""
    namespace = page.findtext("ns", "0").strip()
    model = page.findtext("revision[last()]/model", "wikitext").strip()
    if namespace != "0":
        return f"namespace {namespace}"
    if page.find("redirect") is not None or wikitext.lstrip()[:9].upper() == "#REDIRECT":
        return "redirect"
    if model != "wikitext":
        return f"content model {model}"
    return "disambiguation" if is_disambiguation(wikitext) else None


def _parse(pages: list[bytes]) -> ElementTree.Element:
    if not pages:
        raise RejectedRecord("invalid XML", "the page does not begin")
    try:
        # A document type cannot stand after the first tag, so no entity can be declared, expanded or fetched.
        return ElementTree.fromstring(_OPENING + pages[-1] + _CLOSING)
    except ElementTree.ParseError as error:
        raise RejectedRecord("invalid XML", str(error)) from error


def _row(pages: list[bytes], problems: ReadingProblems) -> Row | None:
    page = _parse(pages)
    title = page.findtext("title", "").strip()
    wikitext = page.findtext("revision[last()]/text")
    if not title or wikitext is None:
        missing = "revision/text" if title else "title"
        raise RejectedRecord("missing field", f"no <{missing}>; the page has {[child.tag for child in page][:8]}")
    reason = _unwanted(page, wikitext)
    text = plain_text(wikitext) if reason is None else ""
    if not text:
        problems.leave_out(reason or "no prose")
        return None
    return {"text": f"{title}\n\n{text}", "title": title, "key": title, "id": page.findtext("id", "").strip()}


def _fault_of_rest(rest: bytes) -> str | None:
    """What is wrong with the bytes behind the last page of a chunk."""
    if _OPENING in rest:
        return "the page does not end"
    known = not rest.strip() or b"<mediawiki" in rest or b"</mediawiki>" in rest
    return None if known else "neither a page nor the head or foot of a MediaWiki export in UTF-8"


class WikipediaPages:
    """Stream format: pages of a MediaWiki export. A record is what ends in ``</page>``."""

    delimiter: ClassVar[bytes] = _CLOSING

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """(place, row) of every article in a chunk, whose payload is bytes that begin between two pages.

        Faults: "invalid XML" (a page that does not parse, or does not end), "missing field", "wikitext not parsed".
        """
        *records, rest = chunk.payload.split(_CLOSING)
        for number, record in enumerate(records, start=max(1, chunk.first)):
            place = f"{chunk.path}:{number}"
            _, *pages = record.split(_OPENING)
            for _ in pages[:-1]:
                problems.add(place, "invalid XML", "the page does not end")
            try:
                row = _row(pages, problems)
            except RejectedRecord as fault:
                problems.add(place, fault.kind, fault.detail)
                continue
            if row is not None:
                yield place, row
        wrong = _fault_of_rest(rest) or (None if records or chunk.first > 1 else "no page in it")
        if wrong is not None:
            problems.add(f"{chunk.path}:{max(1, chunk.first) + len(records)}", "invalid XML", wrong)


EXTRACT = "wiki_"
EXTRACT_NAME = re.compile(r"wiki_\d\d+")
_JSON_LINES = ".jsonl"

_WIKI_EXTRACT_OPENING = re.compile(r"(?m)^<doc\b(.*)>[ \t\r]*$")
_NAME = re.compile(r'(?<!\w)(\w++)="')
_VALUE_END = re.compile(r'"(?=\s*+$|\s++\w++=")')  # a quotation mark in a title is not one
_ESCAPED = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&"))  # the last one last: "&amp;lt;" is "&lt;"
_BEFORE_DATA = b"\xef\xbb\xbf \t\r\n"


def settled(form: str, blocks: Iterator[bytes]) -> tuple[str, Iterator[bytes]]:
    """The form of a stream, and all of its blocks: what WikiExtractor's names leave open, the first character tells."""
    if form != EXTRACT:
        return form, blocks
    held = []
    for block in blocks:
        held.append(block)
        if start := block.lstrip(_BEFORE_DATA):
            form = _JSON_LINES if start.startswith(b"{") else EXTRACT
            break
    return form, chain(held, blocks)


class WikiExtract:
    """Stream format: articles in ``<doc>`` tags. A record is what ends in ``</doc>``."""

    delimiter: ClassVar[bytes] = b"</doc>"

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """(place, row) of every article: its ``text``, the attributes of its tag, and its title as ``key``.

        Faults: "invalid <doc>", "missing field", "invalid UTF-8". Articles of nothing but a title are left out.
        """
        *records, rest = chunk.payload.split(self.delimiter)
        first = max(1, chunk.first)
        for number, record in enumerate(records, start=first):
            place = f"{chunk.path}:{number}"
            try:
                row = _wiki_extract_row(record, place, problems)
            except RejectedRecord as fault:
                problems.add(place, fault.kind, fault.detail)
                continue
            if row["text"] in ("", row["title"]):
                problems.leave_out("no prose")
            else:
                yield place, row
        if rest.strip():
            problems.add(f"{chunk.path}:{first + len(records)}", "invalid <doc>", "it does not end")


def _wiki_extract_row(record: bytes, place: str, problems: ReadingProblems) -> Row:
    text = decode(record).removeprefix("\ufeff")
    openings = list(_WIKI_EXTRACT_OPENING.finditer(text))
    if not openings:
        raise RejectedRecord("invalid <doc>", "it does not begin")
    if text[: openings[0].start()].strip():
        problems.add(place, "invalid <doc>", "text before it")
    for _ in openings[:-1]:
        problems.add(place, "invalid <doc>", "it does not end")
    attributes = {name: html.unescape(value) for name, value in _attributes(openings[-1].group(1))}
    if not attributes.get("title"):
        raise RejectedRecord("missing field", f"no title; the tag has {sorted(attributes)[:8]}")
    return attributes | {"text": _unescaped(text[openings[-1].end() :]).strip(), "key": attributes["title"]}


def _attributes(tag: str) -> Iterator[tuple[str, str]]:
    """(name, value) of the attributes; a value ends at the first quotation mark before another attribute or the end.

    One search for names and one for ends: an expression for both tries every end again for every name.
    """
    ends, last = (found.start() for found in _VALUE_END.finditer(tag)), -1
    for name in _NAME.finditer(tag):
        if name.start() <= last:
            continue  # within the value before
        last = next((end for end in ends if end >= name.end()), -1)
        if last < 0:
            return
        yield name.group(1), tag[name.end() : last]


def _unescaped(text: str) -> str:
    for escape, character in _ESCAPED:
        text = text.replace(escape, character)
    return text
