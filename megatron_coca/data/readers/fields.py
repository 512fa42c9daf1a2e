"""Records to documents: look up the text and metadata of a record, and filter by them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import (
    Document,
    Filters,
    LeftOut,
    ReadingProblems,
    RejectedRecord,
    Row,
    SourceSpec,
    content_key,
)
from megatron_coca.data.readers.streams import decode

# Languages ------------------------------------------------------------------------------------------------------------

# With the names of GitHub's Linguist, from file names and first lines. An ending of several languages stands for the
# most common one. Notebooks are not included: they are JSON, and most of their bytes are pictures.


def _table(text: str) -> dict[str, str]:
    """Language by word, from "language: word word | language: word" in any number of lines."""
    languages = (entry.split(":") for line in text.strip().splitlines() for entry in line.split("|"))
    return {word: language.strip() for language, words in languages for word in words.split()}


_BY_ENDING = _table("""
    Ada: ada adb ads | Assembly: asm s nasm | AsciiDoc: adoc asciidoc | Awk: awk | Batchfile: bat cmd | C: c h
    C#: cs csx | C++: cc cpp cxx c++ hh hpp hxx h++ inl ipp tcc tpp | CMake: cmake | COBOL: cob cbl cobol | CSS: css
    Clojure: clj cljs cljc edn | CoffeeScript: coffee | Common Lisp: lisp lsp cl asd | Crystal: cr | Cuda: cu cuh
    Cython: pyx pxd pxi | D: d | Dart: dart | Dockerfile: dockerfile | Elixir: ex exs | Elm: elm | Emacs Lisp: el
    Erlang: erl hrl | F#: fs fsi fsx | Fortran: f f77 f90 f95 f03 f08 for | GLSL: glsl vert frag geom comp | Go: go
    GraphQL: graphql gql | Groovy: groovy gradle gvy | HCL: hcl tf tfvars | HTML: html htm xhtml | Haskell: hs lhs
    INI: ini cfg | JSON: json | Java: java | JavaScript: js mjs cjs jsx | Julia: jl | Kotlin: kt kts | Lean: lean
    Less: less | Lua: lua | MLIR: mlir | Makefile: mk mak make | Markdown: md markdown mdx | Nim: nim nims
    Nix: nix | OCaml: ml mli | Objective-C: m | Objective-C++: mm | PHP: php php5 phtml | Pascal: pas dpr pp lpr
    Perl: pl pm t | PowerShell: ps1 psm1 psd1 | Prolog: pro prolog | Protocol Buffer: proto | Python: py pyi pyw
    R: r | Racket: rkt | Raku: raku rakumod p6 pm6 | Ruby: rb rake gemspec | Rust: rs | SCSS: scss | SQL: sql
    SWIG: swg i | Sass: sass | Scala: scala sbt sc | Scheme: scm ss sld | Shell: sh bash zsh ksh | Solidity: sol
    Starlark: bzl star bazel | Stylus: styl | Svelte: svelte | Swift: swift | SystemVerilog: sv svh | TOML: toml
    Tcl: tcl | TeX: tex sty cls bib | Text: txt | Thrift: thrift | TypeScript: ts tsx mts cts | VHDL: vhd vhdl
    Verilog: v | Vim Script: vim | Visual Basic .NET: vb | Vue: vue | WebAssembly: wat wast | XML: xml xsd xsl xslt
    YAML: yml yaml | Zig: zig | fish: fish | reStructuredText: rst
""")
_BY_NAME = _table("""
    CMake: cmakelists.txt | Dockerfile: dockerfile containerfile | Groovy: jenkinsfile | JSON: .eslintrc .babelrc
    Makefile: makefile gnumakefile makefile.am makefile.in kbuild
    Meson: meson.build meson_options.txt meson.options | Python: sconstruct sconscript wscript
    Ruby: rakefile gemfile vagrantfile podfile brewfile guardfile
    Shell: .bashrc .bash_profile .profile .zshrc pkgbuild | Starlark: build build.bazel workspace | Text: readme
    Vim Script: .vimrc
""")
_BY_INTERPRETER = _table("""
    Awk: awk gawk mawk | JavaScript: node nodejs | Julia: julia | Lua: lua luajit | Makefile: make | Groovy: groovy
    OCaml: ocaml | PHP: php | Perl: perl | PowerShell: pwsh | Python: python pypy | R: rscript | Ruby: ruby
    Shell: sh bash dash zsh ksh ash | Tcl: tclsh wish expect | TypeScript: deno ts-node | fish: fish
""")
PROSE = frozenset(("AsciiDoc", "Markdown", "TeX", "Text", "reStructuredText"))
"""A paragraph may be one line."""
LANGUAGES = frozenset(_BY_ENDING.values()) | frozenset(_BY_NAME.values())


def language_of_path(path: str) -> str | None:
    """Language of a file by its name; None if unknown."""
    name = path.rpartition("/")[2].lower()
    return _BY_NAME.get(name) or _BY_ENDING.get(name.rpartition(".")[2] if "." in name else "")


def language_of_script(text: str) -> str | None:
    """Language of a script by its first line (``#!/usr/bin/env python3``); None if unknown."""
    if not text.startswith("#!"):
        return None
    words = text[2:].partition("\n")[0][:200].split()
    programs = [PurePosixPath(word).name for word in words if not word.startswith("-") and "=" not in word]
    if programs[:1] == ["env"]:
        programs = programs[1:]
    return _BY_INTERPRETER.get(programs[0].lower().rstrip("0123456789.")) if programs else None


# Filters --------------------------------------------------------------------------------------------------------------

_PERMISSIVE_WORDS = (
    "0bsd afl-3.0 apache-1.1 apache-2.0 artistic-2.0 blueoak-1.0.0 bsd-1-clause bsd-2-clause bsd-2-clause-patent "
    "bsd-3-clause bsd-3-clause-clear bsd-3-clause-lbnl bsd-4-clause bsl-1.0 cc-by-3.0 cc-by-4.0 cc0-1.0 ecl-2.0 "
    "fsfap isc mit mit-0 mit-modern-variant mulanpsl-2.0 ncsa postgresql psf-2.0 python-2.0 unicode-dfs-2016 "
    "unlicense upl-1.0 vim w3c wtfpl x11 zlib zpl-2.1"
)
PERMISSIVE = frozenset(_PERMISSIVE_WORDS.split())
"""Licences that ``permissive`` in ``Filters.licences`` stands for: SPDX names in lower case, no copyleft."""

# Codex left out files with lines of over 100 characters on average or over 1,000 at most (Chen et al. 2021, "Evaluating
# Large Language Models Trained on Code", section 3.1); CodeParrot and The Stack's filters took both numbers over.
MEAN_LINE, LONGEST_LINE = 100, 1000

_HEAD_CHARACTERS, _HEAD_LINES = 2000, 5
_MARKERS = (  # written by generators, anywhere in the head: a licence may come first
    *("@generated", "code generated by", "do not edit", "do not modify this file", "<auto-generated"),
    *("generated by the protocol buffer compiler", "this file was generated", "this file is generated"),
    *("this file was automatically generated", "this file is automatically generated", "machine generated"),
)
_FIRST_LINE_MARKERS = (  # CodeParrot's three words, and first comments of tools; common words further down
    *("autogenerated", "auto-generated", "automatically generated"),
    *("# generated by", "// generated by", "* generated by", "; generated by", "-- generated by", "<!-- generated by"),
)
_GENERATED_WORDS = (
    "package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml composer.lock gemfile.lock poetry.lock pdm.lock "
    "pipfile.lock uv.lock cargo.lock go.sum mix.lock flake.lock packages.lock.json podfile.lock gradle.lockfile "
    "bun.lock deno.lock pubspec.lock package.resolved .terraform.lock.hcl gradlew gradlew.bat mvnw mvnw.cmd"
)
_GENERATED_ENDING_WORDS = (
    "_pb2.py _pb2.pyi _pb2_grpc.py .pb.go .pb.cc .pb.h .pb.rb _pb.js _pb.d.ts .pb.dart .g.dart .freezed.dart "
    ".designer.cs .g.cs .g.i.cs .generated.cs _generated.go .gen.go _pb.rb .pbobjc.h .pbobjc.m .pb.swift .bundle.js "
    ".js.map .css.map"
)
_VENDORED_WORDS = (
    "node_modules bower_components vendor vendors vendored third_party third-party thirdparty 3rdparty dist pods "
    "site-packages .yarn carthage godeps"
)
_GENERATED_NAMES, _VENDORED_FOLDERS = frozenset(_GENERATED_WORDS.split()), frozenset(_VENDORED_WORDS.split())
_GENERATED_ENDINGS = tuple(_GENERATED_ENDING_WORDS.split())
_MINIFIED_ENDINGS = (".min.js", ".min.css", "-min.js", "-min.css", ".min.mjs")


@dataclass(frozen=True, slots=True)
class Facts:
    """Metadata of a record; None where unknown.

    Attributes:
        stars: of the repository.
        licences: SPDX names or expressions, all of which apply.
        language: as named by GitHub's Linguist.
        path: of the file in its repository.
    """

    stars: int | None = None
    licences: tuple[str, ...] | None = None
    language: str | None = None
    path: str | None = None


def admit_facts(facts: Facts, filters: Filters) -> str | None:
    """Reason to leave out a record by its metadata alone; None to keep it."""
    if filters.min_stars:
        if facts.stars is None:
            return "no stars given"
        if facts.stars < filters.min_stars:
            return f"stars below {filters.min_stars}"
    if filters.licences:
        if not facts.licences:
            return "no licence given"
        chosen = frozenset(name.lower() for name in filters.licences)
        chosen |= PERMISSIVE if "permissive" in chosen else frozenset()
        if not all(_is_chosen(licence, chosen) for licence in facts.licences):
            return "licence not chosen"
    if filters.languages:
        language = _language(facts)
        if language is None:
            return "no language given"
        if language.lower() not in {name.lower() for name in filters.languages}:
            return "language not chosen"
    if facts.path is None or (filters.generated and filters.minified):
        return None
    *folders, name = facts.path.lower().split("/")
    if not filters.generated and not _VENDORED_FOLDERS.isdisjoint(folders):
        return "vendored"
    if not filters.generated and (name in _GENERATED_NAMES or name.endswith(_GENERATED_ENDINGS)):
        return "generated"
    return "minified" if not filters.minified and name.endswith(_MINIFIED_ENDINGS) else None


def admit(text: str, facts: Facts, filters: Filters) -> str | None:
    """Reason to leave out a record; None to keep it. A record that lacks the metadata for a filter is left out.

    Licences: every one must be chosen, by its SPDX name or as one of ``permissive``. Minified: files of prose
    (Markdown, ...) may have lines of any length.
    """
    if reason := admit_facts(facts, filters):
        return reason
    if filters.min_bytes or filters.max_bytes is not None:
        size = len(text) if text.isascii() else len(text.encode())
        if reason := size_reason(size, filters):
            return reason
    if not filters.generated and is_generated(text):
        return "generated"
    if not filters.minified and _language(facts) not in PROSE and is_minified(text):
        return "minified"
    return None


def size_reason(size: int, filters: Filters) -> str | None:
    """Reason to leave out a record of ``size`` bytes; None to keep it."""
    if size < filters.min_bytes:
        return f"smaller than {filters.min_bytes} bytes"
    too_large = filters.max_bytes is not None and size > filters.max_bytes
    return f"larger than {filters.max_bytes} bytes" if too_large else None


def is_generated(text: str) -> bool:
    """True if the head of a file marks it as generated."""
    head = text[:_HEAD_CHARACTERS].lower()
    first_lines = "\n".join(head.split("\n", _HEAD_LINES)[:_HEAD_LINES])
    return any(marker in head for marker in _MARKERS) or any(marker in first_lines for marker in _FIRST_LINE_MARKERS)


def is_minified(text: str) -> bool:
    """True if lines are over 100 characters long on average, or one is over 1,000."""
    breaks = text.count("\n")
    if len(text) - breaks > MEAN_LINE * (breaks + (not text.endswith("\n"))):
        return True
    # Jump from line break to line break, by the longest step that a short line allows: far fewer steps than lines.
    start, length = 0, len(text)
    while length - start > LONGEST_LINE:
        line_break = text.rfind("\n", start, start + LONGEST_LINE + 1)
        if line_break < 0:
            return True
        start = line_break + 1
    return False


def _language(facts: Facts) -> str | None:
    return facts.language or (language_of_path(facts.path) if facts.path else None)


def _is_chosen(expression: str, chosen: frozenset[str]) -> bool:
    """A plain choice ("MIT OR GPL-2.0") needs one of its names; any other SPDX expression needs all."""
    words = expression.lower().replace("(", " ").replace(")", " ").split()
    names = [word for word, before in zip(words, ["", *words], strict=False) if before != "with"]
    names = [name for name in names if name not in ("and", "or", "with")]
    enough = any if "or" in words and "and" not in words else all
    return bool(names) and enough(name in chosen for name in names)


# Records --------------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "key": ("key",),
    "set": ("meta.pile_set_name",),
    "stars": ("stars", "max_stars_count", "stargazers_count"),
    "licence": ("licence", "license", "licenses", "max_stars_repo_licenses"),
    "language": ("language", "lang"),
    "path": ("path", "max_stars_repo_path"),
    "repository": ("repository", "repo_name", "max_stars_repo_name"),
}
"""Paths of each field, in order of preference: the names of the Pile and of The Stack."""

_ABSENT = object()


class Fields:
    """Turns the records of a source into documents. Raises ``DataError`` if ``spec.fields`` names an unknown field."""

    def __init__(self, spec: SourceSpec) -> None:
        if unknown := sorted(set(spec.fields) - set(DEFAULTS)):
            raise DataError(f"{spec.name}: unknown fields {unknown}. Known are {', '.join(DEFAULTS)}.")
        self._paths = DEFAULTS | {name: (path,) for name, path in spec.fields.items()}
        self._named_key = spec.fields.get("key")
        self._sets, self._divide = frozenset(spec.sets), spec.divide
        self._filters = spec.filters if spec.filters != Filters() else None

    def documents(self, rows: Iterable[tuple[str, Row]], problems: ReadingProblems) -> Iterator[Document]:
        """Yield the documents of (place, record) pairs; report the other records to ``problems``."""
        for place, row in rows:
            try:
                set_name = self._set(row) if self._sets or self._divide else ""
                text = self._text(row)
                if self._filters and (reason := admit(text, self._facts(row), self._filters)):
                    raise LeftOut(reason)
                document = Document(text, self._key(row) or content_key(text), set_name)
            except RejectedRecord as rejected:
                problems.add(place, rejected.kind, rejected.detail)
            except LeftOut as left_out:
                problems.leave_out(left_out.reason)
            else:
                yield document

    def columns(self, names: Sequence[str], place: str) -> list[str]:
        """The needed ones of a table's columns. ``DataError`` if none holds the text."""
        needed = ["text", "key", "repository"]
        if self._sets or self._divide:
            needed.append("set")
        if self._filters:
            needed += ["stars", "licence", "language", "path"]
        roots = {field: {root for path in self._paths[field] for root in _roots(path)} for field in needed}
        if not roots["text"] & set(names):
            raise DataError(f"{place}: no column {self._paths['text'][0]!r}; the table has {list(names)[:20]}.")
        wanted = set().union(*roots.values())
        return [name for name in names if name in wanted]

    def _look_up(self, row: Row, name: str) -> Any:
        for path in self._paths[name]:
            value = row[path] if path in row else _nested(row, path)
            if value is not None and value is not _ABSENT:
                return value
        return None

    def _set(self, row: Row) -> str:
        name = self._look_up(row, "set")
        if not isinstance(name, str) or not name:
            raise _missing(row, self._paths["set"][0])
        if self._sets and name not in self._sets:
            raise LeftOut("set not chosen")
        return _valid(name)

    def _text(self, row: Row) -> str:
        path = self._paths["text"][0]
        text = row[path] if path in row else _nested(row, path)
        if text is _ABSENT:
            raise _missing(row, path)
        text = decode(text) if isinstance(text, bytes) else text  # tables may hold strings as plain bytes
        if not isinstance(text, str):
            raise RejectedRecord("text is not a string", f"field {path!r} holds {type(text).__name__}")
        if not text or text.isspace():
            raise RejectedRecord("empty text")
        return _valid(text)

    def _key(self, row: Row) -> str:
        """The record's key, else its repository, else an empty string."""
        if self._named_key and self._named_key not in row and _nested(row, self._named_key) is _ABSENT:
            raise _missing(row, self._named_key)
        for name in ("key", "repository"):
            value = self._look_up(row, name)
            if isinstance(value, str | int) and value != "":
                return _valid(str(value))
        return ""

    def _facts(self, row: Row) -> Facts:
        stars, licences = self._look_up(row, "stars"), self._look_up(row, "licence")
        language, path = self._look_up(row, "language"), self._look_up(row, "path")
        try:
            stars = int(stars)
        except (TypeError, ValueError, OverflowError):  # also NaN and infinity
            stars = None
        if isinstance(licences, str):
            licences = (licences,)
        return Facts(
            stars=stars,
            licences=tuple(map(str, licences)) if isinstance(licences, Sequence) else None,
            language=language if isinstance(language, str) else None,
            path=path if isinstance(path, str) else None,
        )


def _nested(row: Row, path: str) -> Any:
    """The value at a dotted path, whose names may themselves contain dots."""
    dot = path.find(".")
    while dot >= 0:
        inner = row.get(path[:dot])
        if isinstance(inner, Mapping):
            rest = path[dot + 1 :]
            value = inner[rest] if rest in inner else _nested(inner, rest)
            if value is not _ABSENT:
                return value
        dot = path.find(".", dot + 1)
    return _ABSENT


def _roots(path: str) -> list[str]:
    """Columns that a dotted path may start in: "a.b" in "a" and "a.b"."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _missing(row: Row, path: str) -> RejectedRecord:
    return RejectedRecord("missing field", f"no {path!r}; the record has {sorted(map(str, row))[:8]}")


def _valid(text: str) -> str:
    """``text`` if it can be encoded in UTF-8: JSON's escapes can spell halves of a surrogate pair."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise RejectedRecord("invalid Unicode", error.reason) from error
    return text
