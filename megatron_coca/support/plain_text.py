"""Text that others wrote, for a terminal, a log or a shared file: without control characters and passwords of URLs."""

import logging
import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a terminal's cursor, change its state or reorder text, and surrogates, which UTF-8 does not
encode; line ends and tabs are not among them.
"""
_URL = re.compile(r"[A-Za-z][\w.+-]+:/[^\s'\"<>]+")
"""With one slash it is an address that was taken for a path."""
_PASSWORD = re.compile(r"(:/{1,2}[^/?#\s:@]*):[^/?#\s@]+@")
_TOKEN = re.compile(r"(https?://)[^/?#\s:@]+@")
"""In an address of the web, a name without a password is a token."""
_SIGNED = re.compile(r"([?&][^=&#]*(?:token|sig|secret|passw|credential|key)[^=&#]*=)[^&#\s]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Return `text` with `***` for passwords, tokens and signatures in its URLs."""

    def mask(url: re.Match[str]) -> str:
        return _SIGNED.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", url[0])))

    return _URL.sub(mask, text) if ":/" in text else text


def password(url: str) -> str | None:
    """Return the password in a URL, None if it has none."""
    found = re.search(r"://[^/?#\s:@]*:([^/?#\s@]+)@", url)
    return None if found is None else found[1]


def plain(text: str) -> str:
    """Return `text` with control characters as escapes, such as `\\x1b`, and its URLs masked; lines stay lines."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), masked(text))


class PlainFormatter(logging.Formatter):
    """Formats log records as `plain` text."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
