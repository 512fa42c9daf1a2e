"""Make text from other sources safe for a terminal, a log or a shared file: no control characters, no passwords."""

import logging
import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor of a terminal, change its state or reorder text, and surrogates, which UTF-8 cannot
encode. Line ends and tabs are allowed.
"""
_URL = re.compile(r"[A-Za-z][\w.+-]+:/[^\s'\"<>]+")
"""Pattern of a URL. A URL that has been converted to a path has only one slash."""
_PASSWORD = re.compile(r"(:/{1,2}[^/?#\s:@]*):[^/?#\s@]+@")
_TOKEN = re.compile(r"(https?://)[^/?#\s:@]+@")
"""Pattern of a token in a web address, which is a user name without a password."""
_SIGNED = re.compile(r"([?&][^=&#]*(?:token|sig|secret|passw|credential|key)[^=&#]*=)[^&#\s]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Return `text` with `***` instead of passwords, tokens and signatures in its URLs."""

    def mask(url: re.Match[str]) -> str:
        return _SIGNED.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", url[0])))

    return _URL.sub(mask, text) if ":/" in text else text


def password(url: str) -> str | None:
    """Return the password in a URL, or None."""
    found = re.search(r"://[^/?#\s:@]*:([^/?#\s@]+)@", url)
    return None if found is None else found[1]


def plain(text: str) -> str:
    """Return `text` with control characters as escapes, such as `\\x1b`, and with masked URLs. Line ends remain."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), masked(text))


class PlainFormatter(logging.Formatter):
    """Formatter that passes log messages through `plain`."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
