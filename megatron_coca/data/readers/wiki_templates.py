"""Templates of MediaWiki that stand for words of a sentence, and the words.

Any other template (boxes, navigation, citations, notices) holds no prose and is left out. The names and their arguments
are those of the English Wikipedia; other editions share many of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence

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
