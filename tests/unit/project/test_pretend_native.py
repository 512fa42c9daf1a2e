"""The library of the stand-in CUDA device, called directly: limits of launches, copies, waits, CUDA graphs."""

import ctypes
import shutil
import subprocess
import sys

import pytest

from tests.pretend import build

pytestmark = pytest.mark.skipif(
    not build.cuda_headers() or shutil.which("gcc") is None,
    reason="needs gcc, and the CUDA headers that Triton brings",
)
KERNEL = 0x1000
OUT_OF_MEMORY = 2
INVALID_CONFIGURATION, CAPTURE_UNSUPPORTED, CAPTURE_ISOLATION = 9, 900, 905


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("pretend") / "library.so"
    sources = [str(source) for source in sorted(build.NATIVE.glob("*.c"))]
    command = build.compiler(build.cuda_headers(), ["nvidia-cudnn-cu13==9.24.1.43; platform_system == 'Linux'"])
    subprocess.run([*command, f"-I{build.NATIVE}", *sources, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    none = [None] * 5
    library.__getattr__("__cudaRegisterFunction")(None, ctypes.c_void_p(KERNEL), None, b"scale", 0, *none)
    return library


def launch(cuda: ctypes.CDLL, grid: int = 1, threads: int = 32, shared: int = 0, stream: int | None = None) -> int:
    dims = Dim3(1, grid, 1), Dim3(threads, 1, 1)
    return cuda.cudaLaunchKernel(ctypes.c_void_p(KERNEL), *dims, None, ctypes.c_size_t(shared), ctypes.c_void_p(stream))


def counts(cuda: ctypes.CDLL) -> dict[tuple[str, str], int]:
    from tests.pretend.device import _counters, _declare

    return dict(_counters(_declare(cuda)))


def allocated(cuda: ctypes.CDLL, count: int) -> int:
    address = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(count)) == 0
    assert address.value is not None
    return address.value


def copy(cuda: ctypes.CDLL, to: object, source: object, count: int) -> None:
    assert cuda.cudaMemcpyAsync(to, source, ctypes.c_size_t(count), 0, None) == 0


def test_cudnn_has_the_version_that_pytorch_requires(cuda: ctypes.CDLL) -> None:
    parts = [ctypes.c_int() for _ in range(3)]
    assert [cuda.cudnnGetProperty(kind, ctypes.byref(part)) for kind, part in enumerate(parts)] == [0, 0, 0]
    assert cuda.cudnnGetVersion() == 92401 and [part.value for part in parts] == [9, 24, 1]


def test_memory_of_the_device_ends(cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETEND_GIB", "40")
    address, memory = ctypes.c_void_p(), [ctypes.c_size_t() for _ in range(2)]
    assert cuda.cudaMemGetInfo(*map(ctypes.byref, memory)) == 0 and memory[1].value == 40 << 30
    assert cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(41 << 30)) == OUT_OF_MEMORY


def test_launches_are_counted_by_name_and_limits_are_those_of_the_device(cuda: ctypes.CDLL) -> None:
    cuda.pretend_reset(False)
    assert launch(cuda, grid=65535, threads=1024) == 0
    assert launch(cuda, grid=65536) == INVALID_CONFIGURATION
    assert launch(cuda, threads=1025) == INVALID_CONFIGURATION
    assert launch(cuda, threads=0) == INVALID_CONFIGURATION
    assert launch(cuda, shared=49153) == INVALID_CONFIGURATION  # not asked for
    maximum = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize
    assert cuda.cudaFuncSetAttribute(ctypes.c_void_p(KERNEL), maximum, 232449) != 0
    assert cuda.cudaFuncSetAttribute(ctypes.c_void_p(KERNEL), maximum, 100000) == 0
    assert launch(cuda, shared=100000) == 0
    assert counts(cuda)["launch", "scale"] == 2
    assert sum(count for (kind, _), count in counts(cuda).items() if kind == "refused") == 5


def test_copies_are_real_and_scalars_that_kernels_may_have_written_read_as_zero(cuda: ctypes.CDLL) -> None:
    first, second = (ctypes.c_void_p(allocated(cuda, 64)) for _ in range(2))
    result = ctypes.c_int64()
    copy(cuda, first, ctypes.byref(ctypes.c_int64(7)), 8)
    copy(cuda, second, first, 8)
    copy(cuda, ctypes.byref(result), second, 8)
    assert result.value == 7
    assert launch(cuda) == 0
    copy(cuda, ctypes.byref(result), second, 8)
    assert result.value == 0


def test_waits_are_reported(cuda: ctypes.CDLL) -> None:
    from tests.pretend.device import _CALLBACK

    seen: list[bytes] = []
    callback = _CALLBACK(lambda kind, name, amount: seen.append(name))
    cuda.pretend_report_waits(callback)
    cuda.cudaDeviceSynchronize()
    cuda.cudaStreamSynchronize(None)
    cuda.pretend_report_waits(None)
    assert seen == [b"cudaDeviceSynchronize", b"cudaStreamSynchronize"]


def test_a_graph_is_captured_over_joined_streams_and_replayed_as_one_launch(cuda: ctypes.CDLL) -> None:
    streams = [ctypes.c_void_p() for _ in range(2)]
    event, before, graph, executable = (ctypes.c_void_p() for _ in range(4))
    for stream in streams:
        cuda.cudaStreamCreate(ctypes.byref(stream))
    cuda.cudaEventCreate(ctypes.byref(event))
    cuda.cudaEventCreate(ctypes.byref(before))
    cuda.cudaEventRecord(before, streams[1])
    cuda.pretend_reset(False)
    assert cuda.cudaStreamBeginCapture(streams[0], 0) == 0
    assert launch(cuda, stream=streams[0].value) == 0
    cuda.cudaEventRecord(event, streams[0])
    cuda.cudaStreamWaitEvent(streams[1], event, 0)
    assert launch(cuda, stream=streams[1].value) == 0
    assert cuda.cudaStreamSynchronize(streams[0]) == CAPTURE_UNSUPPORTED
    assert cuda.cudaStreamWaitEvent(streams[0], before, 0) == CAPTURE_ISOLATION
    assert launch(cuda) == 0
    assert sum(count for (kind, _), count in counts(cuda).items() if kind == "refused") == 3
    assert cuda.cudaStreamEndCapture(streams[0], ctypes.byref(graph)) == 0
    assert cuda.cudaGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert cuda.cudaGraphLaunch(executable, streams[0]) == 0
    assert launch(cuda, stream=streams[1].value) == 0
    counted = counts(cuda)
    assert counted["captured", "scale"] == 2
    assert counted["launch", "CUDA graph"] == 1
    assert counted["launch", "scale"] == 2


def test_the_name_of_the_device_can_be_given(cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ctypes.create_string_buffer(64)
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert cuda.cuDeviceGetName(text, 64, 0) == 0 and text.value == name.encode()
        monkeypatch.setenv("PRETEND_NAME", "NVIDIA H200")


def test_an_unknown_device_is_an_error(cuda: ctypes.CDLL) -> None:
    code = f"import ctypes; ctypes.CDLL({cuda._name!r}).cuDeviceGetName(ctypes.create_string_buffer(64), 64, 0)"
    child = [sys.executable, "-c", code]
    done = subprocess.run(child, env={"PRETEND_CAP": "75"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must be 80, 90 or 100" in done.stderr
