"""Languages of source files, with the names of GitHub's Linguist, from file names and first lines.

An ending of several languages stands for the most common one. Notebooks are not included: they are JSON, and most of
their bytes are pictures.
"""

from pathlib import PurePosixPath


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
