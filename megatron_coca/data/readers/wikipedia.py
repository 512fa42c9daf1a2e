"""Wikipedia as it is distributed: XML exports of MediaWiki (``pages-articles.xml.bz2``).

A page becomes a row with ``text`` (title, blank line, prose), ``title``, ``key`` (the title) and ``id``. Of a page with
several revisions the last one counts. Redirects, other namespaces, disambiguation pages, pages that are not wikitext
and pages without prose are left out, and counted.

The format is described in https://www.mediawiki.org/wiki/Help:Export.
"""

from collections.abc import Iterator
from typing import ClassVar
from xml.etree import ElementTree

from megatron_coca.data.readers.document import Problems, RejectedRecord
from megatron_coca.data.readers.source import Chunk, Row
from megatron_coca.data.readers.wiki_templates import is_disambiguation
from megatron_coca.data.readers.wikitext import plain_text

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


def _row(pages: list[bytes], problems: Problems) -> Row | None:
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

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
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
