"""The host: glibc keeps freed memory, the processor has a name, preloaded libraries are listed."""

import ctypes
import platform
from pathlib import Path

import pytest

from megatron_coca.support.host import keep_freed_memory, preloaded_libraries, processor_name


def test_freed_memory_is_kept_if_the_c_library_can() -> None:
    assert keep_freed_memory() == hasattr(ctypes.CDLL(None), "mallopt")


def test_the_processor_has_its_name_or_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: "flags\t: avx2\nmodel name\t: AMD EPYC: 9005\nmodel name\t: other\n"
    )
    assert processor_name() == "AMD EPYC: 9005"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "CPU part\t: 0xd40\n")
    assert processor_name() == platform.machine()


def test_preloaded_libraries_are_separated_by_spaces_or_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/one.so:two.so  /opt/three.so")
    assert preloaded_libraries() == ["one.so", "two.so", "three.so"]
    monkeypatch.delenv("LD_PRELOAD")
    assert preloaded_libraries() == []
