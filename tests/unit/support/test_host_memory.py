"""Host memory: glibc keeps freed memory."""

import ctypes

from megatron_coca.support.host_memory import keep_freed_memory


def test_freed_memory_is_kept_if_the_c_library_can() -> None:
    assert keep_freed_memory() == hasattr(ctypes.CDLL(None), "mallopt")
