"""The native launcher, without a GPU: what it refuses, and what it asks of the driver.

What it asks is seen through fake_driver.c, a libcuda.so.1 that writes every call down. It is loaded in a process of its
own, because a process opens the driver once.
"""

import ctypes
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from deep_tile import _launcher

ROOT = Path(__file__).resolve().parent.parent
CUDA_INCLUDE = Path("/usr/local/cuda/include")
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")

A_MAP = (1, 7168, 4096, 7168, 128, 64, 128)
B_MAP = (1, 7168, 2112, 7168, 128, 96, 128)
OUT_MAP = (2, 2112, 4096, 4224, 64, 64, 128)
LAUNCH = {
    "grid": 132,
    "cluster": 2,
    "threads": 384,
    "a_map": A_MAP,
    "b_map": B_MAP,
    "out_map": OUT_MAP,
    "a_tail_rows": 0,
    "b_tail_rows": 0,
    "narrow_rows": 0,
    "narrow_columns": 0,
    "a_scale_strides": (56, 1),
    "b_scale_strides": (1, 17),
    "out_stride_m": 2112,
    "m": 4096,
    "n": 2112,
    "k": 7168,
    "pdl": False,
    "early_b": False,
    "raster_rows_log2": 4,
    "last_rows_reciprocal": 2**27,
}

# Loads the launcher by its path: importing the package would import torch, which may open the real driver.
PREAMBLE = f"""
import ctypes, importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("_launcher", {_launcher.__file__!r})
launcher = importlib.util.module_from_spec(importlib.util.spec_from_loader("_launcher", loader))
loader.exec_module(launcher)
def opened_libraries():
    return open("/proc/self/maps").read()
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)


# ---- what it is


def test_gemm_params_bytes():
    """Six tensor maps, three pointers, four strides of 4 bytes and one of 8, ten ints, rounded up to 64 bytes."""
    fields_bytes = 6 * 128 + struct.calcsize("10i3P4Iq")
    assert (fields_bytes + 63) // 64 * 64 == _launcher.GEMM_PARAMS_BYTES


def test_is_a_stable_abi_extension():
    assert Path(_launcher.__file__).name == "_launcher.abi3.so"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_depends_on_libc_alone():
    dynamic = subprocess.run(["readelf", "-d", _launcher.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed, dynamic
    assert all(re.match(r"(libc|libdl|libpthread|ld-linux.*|libc\.musl.*)\.so", library) for library in needed), needed


def test_import_opens_no_driver():
    run = run_python(PREAMBLE + "print('libcuda' in opened_libraries(), '_launcher' in opened_libraries())")
    assert run.stdout.split() == ["False", "True"], run.stderr


def test_driver_version():
    """Where there is a driver it is asked, and where there is none the error says what to do."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match=r"libcuda\.so\.1.*install the NVIDIA driver: 525 or newer"):
            _launcher.driver_version()
    else:
        assert _launcher.driver_version() >= 12000


# ---- what it refuses


def elf(size: int, sections_at: int = 64, sections: int = 0) -> bytes:
    """An ELF header with a section table, padded to `size` bytes."""
    header = struct.pack(
        "<4s12xHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 64, sections_at, 0, 64, 56, 0, 64, sections, 0
    )
    return header.ljust(size, b"\0")


WHOLE_CUBIN = elf(size=256, sections=3)


@pytest.mark.parametrize(
    "cubin",
    [
        b"",
        b"\x7fELF",
        b"PTX".ljust(256),
        WHOLE_CUBIN[:-1],
        elf(size=256, sections_at=257),
        elf(size=256, sections_at=2**64 - 1),
    ],
    ids=["empty", "header cut", "no ELF", "sections cut", "sections past the end", "offset that wraps round"],
)
def test_load_refuses_torn_cubins(cubin):
    with pytest.raises(ValueError, match=rf"cubin is no whole ELF file \({len(cubin)} bytes\); compile gemm again"):
        _launcher.load(cubin, "gemm", 1024, 0)


@pytest.mark.parametrize(("smem_bytes", "device"), [(-1, 0), (1024, -1)])
def test_load_refuses_negative_numbers(smem_bytes, device):
    with pytest.raises(ValueError, match=f"smem_bytes is {smem_bytes} and device is {device}"):
        _launcher.load(WHOLE_CUBIN, "gemm", smem_bytes, device)


def with_number(layout: tuple, index: int, number: object) -> tuple:
    return (*layout[:index], number, *layout[index + 1 :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 0}, "grid is 0, want 1 to 2147483647"),
        ({"grid": 131}, "grid is 131, want a multiple of cluster, 2"),
        ({"cluster": 9}, "cluster is 9, want 1 to 8"),
        ({"threads": 1025}, "threads is 1025, want 1 to 1024"),
        ({"m": 0}, "m is 0, want 1 to 2147483647"),
        ({"n": 2**31}, "n is 2147483648, want 1 to 2147483647"),
        ({"k": 2**80}, f"k is {2**80}, want 1 to 2147483647"),
        ({"a_tail_rows": 257}, "a_tail_rows is 257, want 0 to 256"),
        ({"b_tail_rows": -1}, "b_tail_rows is -1, want 0 to 256"),
        ({"a_tail_rows": 128}, "a_tail_rows is 128, want at most a_map.box_outer, 64"),
        (
            {"b_map": with_number(B_MAP, 2, 2100)},
            "b_tail_rows is 0, want what is left of b_map.outer, 2100, beside boxes of 96",
        ),
        ({"narrow_rows": 257}, "narrow_rows is 257, want 0 to 256"),
        ({"narrow_columns": -1}, "narrow_columns is -1, want 0 to 2147483647"),
        ({"narrow_columns": 3}, "narrow_rows is 0, want box_outer of 3 narrow_columns"),
        (
            {"narrow_rows": 64, "narrow_columns": 34},
            "narrow_columns of narrow_rows are 2176 rows, want at most b_map.outer, 2112",
        ),
        (
            {"narrow_rows": 64, "narrow_columns": 1},
            "b_tail_rows is 0, want what is left of b_map.outer, 2048, beside boxes of 96",
        ),
        ({"a_scale_strides": (-1, 1)}, "a_scale_strides[0] is -1, want 0 to 9223372036854775807"),
        ({"b_scale_strides": (1, 2**63)}, "b_scale_strides[1] is 9223372036854775808, want 0 to 9223372036854775807"),
        (
            {"a_scale_strides": (2**19, 1)},
            "the last element of a_scale is more than 1073741823 elements from its first, with strides (524288, 1)",
        ),
        (
            {"m": 2**30 + 1, "k": 128, "a_scale_strides": (1, 1)},
            "the last element of a_scale is more than 1073741823 elements from its first, with strides (1, 1)",
        ),
        ({"b_scale_strides": (1, 2**62)}, "the last element of b_scale is more than 1073741823 elements"),
        ({"out_stride_m": -2112}, "out_stride_m is -2112, want 0 to"),
        ({"raster_rows_log2": 0}, "raster_rows_log2 is 0, want 1 to 4"),
        ({"last_rows_reciprocal": 2**31 + 1}, "last_rows_reciprocal is 2147483649, want 1 to 2147483648"),
        ({"a_map": with_number(A_MAP, 0, 4)}, "a_map.element_bytes is 4, want 1 to 2"),
        ({"a_map": with_number(A_MAP, 1, 0)}, "a_map.inner is 0, want 1 to 4294967296"),
        ({"b_map": with_number(B_MAP, 2, 2**32 + 1)}, "b_map.outer is 4294967297, want 1 to 4294967296"),
        ({"b_map": with_number(B_MAP, 3, 7176)}, "b_map.outer_stride_bytes is 7176, want a multiple of 16"),
        ({"b_map": with_number(B_MAP, 3, 2**40)}, "b_map.outer_stride_bytes is 1099511627776, want 16 to"),
        ({"b_map": with_number(B_MAP, 4, 24)}, "b_map.box_inner is 24 bytes, want a multiple of 16"),
        ({"out_map": with_number(OUT_MAP, 4, 72)}, "out_map.box_inner is 144 bytes, want at most swizzle_bytes, 128"),
        ({"out_map": with_number(OUT_MAP, 5, 257)}, "out_map.box_outer is 257, want 1 to 256"),
        ({"out_map": with_number(OUT_MAP, 6, 48)}, "out_map.swizzle_bytes is 48, want 0, 32, 64 or 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_prepare_names_the_wrong_number(change, message):
    with pytest.raises(ValueError, match=re.escape(f"prepare: {message}")):
        _launcher.prepare(None, **LAUNCH | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "kernel is None, want the Kernel that load() returned"),
        ({"out_map": None}, "kernel is None, want the Kernel that load() returned"),
        ({"m": 2**30, "k": 128, "a_scale_strides": (1, 1)}, "kernel is None, want the Kernel that load() returned"),
        ({"m": 4096.0}, "m is 4096.0, want an int"),
        ({"a_map": A_MAP[:-1]}, "want a tuple (element_bytes, inner, outer, outer_stride_bytes, box_inner, box_outer"),
        ({"a_map": None}, "a_map is None, want a tuple"),
        ({"b_map": with_number(B_MAP, 4, "128")}, "b_map.box_inner is '128', want an int"),
    ],
)
def test_prepare_names_the_wrong_type(change, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        _launcher.prepare(None, **LAUNCH | change)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), TypeError, "got 0 arguments, want 7: prepared, a, a_scale, b, b_scale, out, stream"),
        ((None, 0, 0, 0, 0, 0, 0, 0), TypeError, "got 8 arguments, want 7"),
        ((None, 0, 0, 0, 0, 0, 0), TypeError, "prepared is None, want the Launch that prepare() returned"),
        ((None, 0, 1.5, 0, 0, 0, 0), TypeError, "a_scale is 1.5, want an address"),
        ((None, 0, 0, 0, 0, -1, 0), TypeError, "out is -1, want an address"),
        ((None, 0, 0, 0, 0, 0, 2**64), TypeError, f"stream is {2**64}, want an address"),
    ],
)
def test_launch_names_the_wrong_argument(arguments, error, message):
    with pytest.raises(error, match=re.escape(f"launch: {message}")):
        _launcher.launch(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("signature", (1, 2), "signature: got 2 arguments, want 5"),
        ("launch_known", ({}, ()), "launch_known: want 7 arguments: a dict, a tuple, a, a_scale, b, b_scale, out"),
        ("launch_known", ([], (), 1, 2, 3, 4, 5), "launch_known: want 7 arguments: a dict"),
        ("launch_known", ({}, [], 1, 2, 3, 4, 5), "launch_known: want 7 arguments: a dict, a tuple"),
        ("bind", (None, 1), "bind: got 2 arguments, want 6: prepared, a"),
        ("bind", (None, 1, 2, 3, 4, 5), "bind: prepared is None, want the Launch that prepare() returned"),
        ("launch_bound", (None, 1, 2, 3), "launch_bound: want 4 arguments: what bind() returned"),
        ("launch_bound", (), "launch_bound: want 4 arguments"),
        ("read_tensors_of", (7,), "read_tensors_of: got 7, want a type"),
        ("read_tensors_of", (int, "16", 168, 1), "cannot be interpreted as an integer"),
    ],
)
def test_tensor_calls_name_the_wrong_argument(name, arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(_launcher, name)(*arguments)


@pytest.mark.parametrize("name", ["Kernel", "Launch", "BoundLaunch"])
def test_handles_cannot_be_made_by_hand(name):
    with pytest.raises(TypeError, match="cannot create"):
        getattr(_launcher, name)()


# ---- what it asks of the driver


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("fake_driver") / "libcuda.so.1"
    source = ROOT / "tests" / "fake_driver.c"
    options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*COMPILER, *options, "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def run_on_fake_driver(fake_driver):
    """Runs code that knows `launcher`, `load()`, `LAUNCH`, `ADDRESSES` and `fake`; its output holds a line per call."""
    setup = f"""
fake = ctypes.CDLL({str(fake_driver)!r}, mode=ctypes.RTLD_GLOBAL)
LAUNCH = {LAUNCH!r}
ADDRESSES = (0xA00, 0xA4, 0xB00, 0xB4, 0xC00)
def with_address(name, address):
    names = ("a", "a_scale", "b", "b_scale", "out")
    return [address if name == other else given for other, given in zip(names, ADDRESSES)]
def load(device=0):
    return launcher.load({WHOLE_CUBIN!r}, "gemm", 200_000, device)
def begin():
    print("---", flush=True)
"""

    def run(code: str, **environment: str) -> str:
        process = run_python(PREAMBLE + setup + code, **environment)
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run


def test_load_leaves_nothing_for_the_launch(run_on_fake_driver):
    """The kernel is loaded in the device's primary context, and that context is left again."""
    out = run_on_fake_driver("""
kernel = load(device=3)
begin()
print(kernel.name, kernel.device, kernel.registers, kernel.local_bytes)
try:
    kernel.device = 4
except AttributeError:
    print("read-only")
""")
    calls, attributes = out.split("---\n")
    assert calls.splitlines() == [
        "cuInit 0",
        "cuDeviceGet 3",
        "cuDevicePrimaryCtxRetain 3",
        "cuCtxGetCurrent ",
        "cuCtxPushCurrent 0xc3",
        "cuLibraryLoadData ELF options 0",
        "cuLibraryGetKernel 0x11b gemm",
        "cuKernelSetAttribute 8=200000 0x4e1 device 3",
        "cuKernelGetFunction 0x4e1",
        "cuFuncGetAttribute 4 0xf",
        "cuFuncGetAttribute 3 0xf",
        "cuCtxPopCurrent ",
    ]
    assert attributes.split() == ["gemm", "3", "168", "8", "read-only"]


def test_prepare_encodes_maps(run_on_fake_driver):
    """In the kernel's context, which a thread that has used no GPU does not have."""
    out = run_on_fake_driver("""
kernel = load()
begin()
launcher.prepare(kernel, **LAUNCH)
""")
    assert out.split("---\n")[1].splitlines() == [
        "cuCtxGetCurrent ",
        "cuCtxPushCurrent 0xc0",
        "cuTensorMapEncodeTiled 0x80 type 0 rank 2 sizes 7168,4096 stride 7168 box 128,64 steps 1,1 "
        "interleave 0 swizzle 3 promotion 2 fill 0 misaligned 0",
        "cuTensorMapEncodeTiled 0x80 type 0 rank 2 sizes 7168,2112 stride 7168 box 128,96 steps 1,1 "
        "interleave 0 swizzle 3 promotion 2 fill 0 misaligned 0",
        "cuTensorMapEncodeTiled 0x80 type 9 rank 2 sizes 2112,4096 stride 4224 box 64,64 steps 1,1 "
        "interleave 0 swizzle 3 promotion 0 fill 0 misaligned 0",
        "cuCtxPopCurrent ",
    ]


def test_every_step_finds_the_context_that_it_needs(run_on_fake_driver):
    """In threads without a context and with that of another GPU, which gets it back."""
    out = run_on_fake_driver("""
from threading import Thread
kernel, other = load(), ctypes.c_void_p(0xC1)
def work(begin):
    begin()
    launcher.launch(launcher.prepare(kernel, **LAUNCH), 0xA00, 0xA5, 0xB00, 0xB5, 0xC00, 0x57)
    load(device=2)
    seen = ctypes.c_void_p()
    fake.cuCtxGetCurrent(ctypes.byref(seen))
    print("then", seen.value and hex(seen.value), flush=True)
for begin in (lambda: None, lambda: fake.cuCtxPushCurrent(other)):
    thread = Thread(target=work, args=(begin,))
    thread.start()
    thread.join()
""")
    assert re.findall(r"then (\S+)", out) == ["None", "0xc1"]
    assert re.findall(r"cuLaunchKernelEx \S+ context (\S+)", out) == ["0xc0"] * 2


def maps_of_a_launch(run_on_fake_driver, changes: str) -> tuple[list[str], list[str], str]:
    """Of a launch with these fields of LAUNCH changed: the maps encoded, the addresses put in, the launch itself."""
    out = run_on_fake_driver(f"""
kernel = load()
begin()
prepared = launcher.prepare(kernel, **LAUNCH | {changes})
fake.cuCtxPushCurrent(ctypes.c_void_p(0xC0))
launcher.launch(prepared, 0xA00, 0xA5, 0xB00, 0xB5, 0xC00, 0)
""")
    lines = out.split("---\n")[1].splitlines()
    encoded = [re.search(r"sizes \S+ .* box \S+", line)[0] for line in lines if line.startswith("cuTensorMapEncode")]
    replaced = [line.split()[1] for line in lines if line.startswith("cuTensorMapReplaceAddress")]
    return encoded, replaced, lines[-1]


def test_tails_have_maps_of_their_own(run_on_fake_driver):
    encoded, replaced, launched = maps_of_a_launch(run_on_fake_driver, '{"a_tail_rows": 5, "b_tail_rows": 48}')
    assert encoded == [
        "sizes 7168,4096 stride 7168 box 128,64",
        "sizes 7168,2112 stride 7168 box 128,96",
        "sizes 7168,4096 stride 7168 box 128,5",
        "sizes 7168,2112 stride 7168 box 128,48",
        "sizes 2112,4096 stride 4224 box 64,64",
    ]
    assert replaced == ["0xa00", "0xb00", "0xa00", "0xb00", "0xc00"]
    assert "tails 5,48" in launched


def test_narrow_tiles_have_a_map_of_their_own(run_on_fake_driver):
    encoded, replaced, launched = maps_of_a_launch(run_on_fake_driver, '{"narrow_rows": 64, "narrow_columns": 3}')
    assert "sizes 7168,2112 stride 7168 box 128,64" in encoded
    assert replaced == ["0xa00", "0xb00", "0xb00", "0xc00"]
    assert "narrow 3" in launched


def test_launch_from_a_thread_without_a_context(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
begin()
launcher.launch(prepared, 0xA00, 0xA5, 0xB00, 0xB5, 0xC00, 0x57)
""")
    assert out.split("---\n")[1].splitlines() == [
        "cuCtxGetCurrent ",
        "cuCtxPushCurrent 0xc0",
        "cuTensorMapReplaceAddress 0xa00 misaligned 0",
        "cuTensorMapReplaceAddress 0xb00 misaligned 0",
        "cuTensorMapReplaceAddress 0xc00 misaligned 0",
        "cuLaunchKernelEx 0xf context 0xc0 grid 132,1,1 block 384,1,1 smem 200000 stream 0x57 attributes 1 cluster 2 "
        "pdl 0 extra (nil) maps a00,b00,c00 a_scale 0xa5 b_scale 0xb5 out 0xc00 strides 56,1 1,17 2112 "
        "sizes 4096,2112,7168 tails 0,0 narrow 0 early_b 0 raster 4 134217728",
        "cuCtxPopCurrent ",
    ]


def test_launch_in_the_right_context_leaves_it_alone(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
fake.cuCtxPushCurrent(ctypes.c_void_p(0xC0))
begin()
launcher.launch(prepared, *ADDRESSES, 0)
""")
    calls = [line.split()[0] for line in out.split("---\n")[1].splitlines()]
    assert calls == ["cuCtxGetCurrent", *["cuTensorMapReplaceAddress"] * 3, "cuLaunchKernelEx"]


@pytest.mark.parametrize(
    ("cluster", "pdl", "early_b", "attributes"),
    [
        (1, False, False, "attributes 0 cluster 0 pdl 0"),
        (1, True, False, "attributes 1 cluster 0 pdl 1"),
        (2, True, True, "attributes 2 cluster 2 pdl 1"),
    ],
)
def test_launch_attributes(run_on_fake_driver, cluster, pdl, early_b, attributes):
    out = run_on_fake_driver(f"""
prepared = launcher.prepare(load(), **LAUNCH | {{"cluster": {cluster}, "pdl": {pdl}, "early_b": {early_b}}})
launcher.launch(prepared, *ADDRESSES, 0)
""")
    assert attributes in out
    assert f"early_b {early_b:d}" in out


def test_operands_need_alignment(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
begin()
for name, address in (("a", 24), ("b", 31)):
    try:
        launcher.launch(prepared, *with_address(name, address), 0)
    except ValueError as error:
        print(error)
""")
    assert out.split("---\n")[1].splitlines() == [
        "launch: the address of a is 8 modulo 16, want a multiple of 16 for TMA",
        "launch: the address of b is 15 modulo 16, want a multiple of 16 for TMA",
    ]


def test_out_needs_alignment_only_for_its_map(run_on_fake_driver):
    out = run_on_fake_driver("""
kernel = load()
with_map, without = launcher.prepare(kernel, **LAUNCH), launcher.prepare(kernel, **LAUNCH | {"out_map": None})
begin()
try:
    launcher.launch(with_map, *with_address("out", 0xC02), 0)
except ValueError as error:
    print(error, flush=True)
launcher.launch(without, *with_address("out", 0xC02), 0)
""")
    lines = out.split("---\n")[1].splitlines()
    assert lines[0] == "launch: the address of out is 2 modulo 16, want a multiple of 16 for TMA"
    assert [line.split()[0] for line in lines].count("cuTensorMapReplaceAddress") == 2
    assert "maps a00,b00,0 " in out
    assert "out 0xc02" in out


@pytest.mark.parametrize("name", ["a", "a_scale", "b", "b_scale", "out"])
def test_no_launch_without_memory(run_on_fake_driver, name):
    """Whether TMA or the kernel itself would use the address."""
    out = run_on_fake_driver(f"""
kernel = load()
for out_map in (LAUNCH["out_map"], None):
    prepared = launcher.prepare(kernel, **LAUNCH | {{"out_map": out_map}})
    try:
        launcher.launch(prepared, *with_address({name!r}, 0), 0)
    except ValueError as error:
        print(error, flush=True)
""")
    message = f"launch: the address of {name} is 0, want that of memory: pass a tensor whose storage is allocated"
    assert out.splitlines().count(message) == 2
    assert "cuTensorMapReplaceAddress" not in out and "cuLaunchKernelEx" not in out


def test_threads_do_not_share_a_launch(run_on_fake_driver):
    """Every line of a launch speaks of one caller's addresses."""
    out = run_on_fake_driver("""
from threading import Thread
prepared = launcher.prepare(load(), **LAUNCH)
def work(base):
    for call in range(100):
        launcher.launch(prepared, base + 16, base + 32, base + 48, base + 64, base + 80, base)
threads = [Thread(target=work, args=(0x1000 * (i + 1),)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    launches = re.findall(r"stream 0x(.)000 .* maps (.)010,(.)030,(.)050 a_scale 0x(.)020 b_scale 0x(.)040 out", out)
    assert len(launches) == 400
    assert all(len(set(bases)) == 1 for bases in launches)


@pytest.mark.parametrize(
    ("code", "failure", "message"),
    [
        (
            "load()",
            "cuInit=100",
            r"cuInit failed for kernel gemm: .*\(100\).*; no NVIDIA GPU is visible: check nvidia-smi",
        ),
        ("load()", "cuInit=3", r"cuInit failed .* start workers with 'spawn'"),
        ("load(device=7)", "cuDeviceGet=101", r"cuDeviceGet failed .*check the device index"),
        (
            "load()",
            "cuLibraryLoadData=209",
            r"cuLibraryLoadData failed for kernel gemm: CUDA_ERROR_NAME \(209\), the driver's text; "
            r"the kernels are built for sm_90a and run on Hopper GPUs only",
        ),
        ("load()", "cuLibraryLoadData=300", r"clear the kernel cache, or update the NVIDIA driver"),
        ("load()", "cuLibraryGetKernel=500", r"the cubin holds no kernel of that name"),
        ("launch()", "cuLaunchKernelEx=400", r"the stream must belong to the kernel's device"),
        ("launch()", "cuTensorMapEncodeTiled=1", r"cuTensorMapEncodeTiled failed for kernel gemm: .*\(1\)"),
        ("launch()", "cuTensorMapReplaceAddress=1", r"cuTensorMapReplaceAddress failed for kernel gemm: .*\(1\)"),
        ("launch()", "cuCtxGetCurrent=201", r"cuCtxGetCurrent failed for kernel gemm"),
        ("launcher.driver_version()", "cuDriverGetVersion=999", r"cuDriverGetVersion failed: .*\(999\)"),
        ("load()", "cuInit=9999", r"cuInit failed for kernel gemm: unknown error \(9999\), no description"),
    ],
)
def test_driver_failures_say_what_and_why(run_on_fake_driver, code, failure, message):
    out = run_on_fake_driver(
        f"""
def launch():
    launcher.launch(launcher.prepare(load(), **LAUNCH), *ADDRESSES, 0)
try:
    {code}
except RuntimeError as error:
    print("error:", error, flush=True)
""",
        FAKE_DRIVER_FAIL=failure,
    )
    assert re.search("error: .*" + message, out), out
    assert out.count("cuCtxPushCurrent") == out.count("cuCtxPopCurrent"), "the caller's context must come back"


@pytest.mark.parametrize(
    "result", [214, 220, 226, 700, 702, 710, *range(714, 720), 721], ids=lambda result: f"error {result}"
)
def test_failures_of_earlier_kernels_are_not_this_calls(run_on_fake_driver, result):
    """Such errors stick to the context: whichever call comes next reports them."""
    out = run_on_fake_driver(
        """
try:
    launcher.launch(launcher.prepare(load(), **LAUNCH), *ADDRESSES, 0)
except RuntimeError as error:
    print("error:", error, flush=True)
""",
        FAKE_DRIVER_FAIL=f"cuLaunchKernelEx={result}",
    )
    assert out.splitlines()[-1] == (
        f"error: an earlier kernel of this process failed: CUDA_ERROR_NAME ({result}), the driver's text; "
        "cuLaunchKernelEx for kernel gemm only met it. CUDA is of no more use to this process: start another, and find "
        "that kernel with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1"
    )


def test_old_driver(run_on_fake_driver):
    out = run_on_fake_driver(
        """
for attempt in range(2):
    try:
        load()
    except RuntimeError as error:
        print(error)
""",
        FAKE_DRIVER_LACKS="cuLibraryLoadData",
    )
    line = "the CUDA driver has no cuLibraryLoadData; update the NVIDIA driver: 525 or newer for CUDA 12, 580 or newer"
    assert [text.startswith(line) for text in out.splitlines()] == [True, True], out


# ---- how it reads tensors

# A tensor library in a few lines: DLPack's C exchange API around Python functions.
MADE_UP_TENSORS = """
class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int * 2), ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]

GPU_MEMORY = 0x700000000

class Tensor:
    def __init__(self, address, shape, strides=None, dtype=(10, 8), device=(2, 0), offset=0, memory=True,
                 base=GPU_MEMORY):
        self.view = View(base + address, device, len(shape), (*dtype, 1, 0), byte_offset=offset)
        self.sizes = [(ctypes.c_int64 * len(shape))(*x) for x in (shape, strides or (shape[-1], 1))]
        self.view.shape, self.view.strides = (ctypes.addressof(x) for x in self.sizes)
        self.memory = memory

@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))
def view(tensor, out):
    out[0] = tensor.view
    return 0 if tensor.memory else -1

@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def current_stream(device_type, index, stream):
    stream[0] = 0x5000 + 0x100 * device_type + index
    return 0

class Exchange(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32 * 2), ("older", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3),
                ("view", ctypes.c_void_p), ("current_stream", ctypes.c_void_p)]

def exchange(version=(1, 3), older=None, view=ctypes.cast(view, ctypes.c_void_p)):
    return Exchange(version, older, (None,) * 3, view, ctypes.cast(current_stream, ctypes.c_void_p))

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.argtypes, new_capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object

def tensor_type(table, name=b"dlpack_exchange_api"):
    capsule = new_capsule(ctypes.addressof(table), name, None)
    return type("Typed", (Tensor,), {"__dlpack_c_exchange_api__": capsule})

table = exchange()
Typed = tensor_type(table)
"""

CALL = """
print(launcher.read_tensors_of(Typed), flush=True)
GOOD = {
    "a": {"address": 0xA00, "shape": (4096, 7168)},
    "a_scale": {"address": 0xA4, "shape": (4096, 56), "dtype": (2, 32)},
    "b": {"address": 0xB00, "shape": (2112, 7168)},
    "b_scale": {"address": 0xB4, "shape": (17, 56), "strides": (1, 17), "dtype": (2, 32)},
    "out": {"address": 0xC00, "shape": (4096, 2112), "dtype": (4, 16)},
}
def call(kind=Typed, **changes):
    return [kind(**GOOD[name] | changes.get(name, {})) for name in GOOD]
def attempt(function, *arguments):
    try:
        print(function(*arguments), flush=True)
    except (TypeError, ValueError) as error:
        print(error, flush=True)
prepared = launcher.prepare(load(), **LAUNCH)
launches = {launcher.signature(*call()): prepared}
OPTIONS = (1, True, None)
known = {OPTIONS: (OPTIONS, launches)}
begin()
"""


@pytest.fixture
def run_with_tensors(run_on_fake_driver):
    """Runs code that knows `call()`, `launches` and `attempt()` too; the lines after the first "---"."""

    def run(code: str) -> list[str]:
        before, _, after = run_on_fake_driver(MADE_UP_TENSORS + CALL + code).partition("---\n")
        assert before.splitlines()[0] == "True"
        return after.splitlines()

    return run


def test_launch_known(run_with_tensors):
    """The signature finds the launch; addresses, with their offset, and the stream are those of the call."""
    lines = run_with_tensors("""
attempt(launcher.launch_known, known, OPTIONS, *call(a={"address": 0x1A00}, out={"address": 0xB00, "offset": 0x100}))
""")
    assert [line.split()[0] for line in lines[2:5]] == ["cuTensorMapReplaceAddress"] * 3
    assert "stream 0x5200 " in lines[5]
    assert (
        "maps 700001a00,700000b00,700000c00 a_scale 0x7000000a4 b_scale 0x7000000b4 out 0x700000c00 "
        "strides 56,1 1,17 2112"
    ) in lines[5]
    assert lines[6:] == ["cuCtxPopCurrent ", "True"]


DIFFERENT = {
    "dtype": '{"a": {"dtype": (12, 8)}}',
    "bits": '{"b_scale": {"dtype": (2, 16)}}',
    "rows": '{"a": {"shape": (4095, 7168)}}',
    "columns": '{"b": {"shape": (2112, 7040), "strides": (7168, 1)}}',
    "row stride": '{"out": {"strides": (2120, 1)}}',
    "column stride": '{"a_scale": {"strides": (1, 4096)}}',
    "alignment of out": '{"out": {"address": 0xC02}}',
    "device": '{name: {"device": (2, 1)} for name in GOOD}',
    "kind of device": '{name: {"device": (1, 0)} for name in GOOD}',
}
UNREADABLE = {
    "rank": '{"a": {"shape": (4096, 56, 128), "strides": (7168, 128, 1)}}',
    "other device": '{"b": {"device": (2, 1)}}',
    "unknown to DLPack": '{"out": {"memory": False}}',
    **{f"no memory, {name}": f'{{"{name}": {{"address": 0, "base": 0}}}}' for name in ("a", "a_scale", "b", "out")},
    "freed memory": '{"b_scale": {"address": 0, "base": 0, "offset": 0xFFFFFFFF}}',
    "no memory on the CPU": '{name: {"device": (1, 0), "address": 0, "base": 0} for name in GOOD}',
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_every_difference_is_another_signature(run_with_tensors, change):
    """Nothing reaches the driver."""
    lines = run_with_tensors(f"""
changed = call(**{change})
attempt(launcher.launch_known, known, OPTIONS, *changed)
print(launcher.signature(*changed) in launches, launcher.signature(*changed) == launcher.signature(*call(**{change})))
""")
    assert lines == ["False", "False True"]


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_left_to_python(run_with_tensors, change):
    lines = run_with_tensors(f"""
attempt(launcher.launch_known, known, OPTIONS, *call(**{change}))
attempt(launcher.signature, *call(**{change}))
attempt(launcher.bind, prepared, *call(**{change}))
""")
    assert lines == ["False", "None", "None"]


KEYED_TENSORS = """
class Keyed(Tensor):  # its keys are the characters of a bytes object that a slot points to
    __slots__ = ("keys",)

Keyed.__dlpack_c_exchange_api__ = Typed.__dlpack_c_exchange_api__

def keyed(address, keys=0b011, **layout):
    tensor = Keyed(address, **layout)
    tensor.keys = keys.to_bytes(8, "little")
    return tensor

def find_slot(tensor):
    words = range(0, Keyed.__basicsize__, 8)
    return next(at for at in words if ctypes.c_uint64.from_address(id(tensor) + at).value == id(tensor.keys))

place = find_slot(keyed(0xA00, shape=(1, 1))), bytes.__basicsize__ - 1
print(launcher.read_tensors_of(Keyed, *place, 0b111), flush=True)
launches[launcher.signature(*call(kind=keyed))] = prepared
begin()
"""


def test_what_is_not_plain_is_left_to_python(run_with_tensors):
    """Keys that a plain tensor lacks are in nothing that DLPack tells."""
    lines = run_with_tensors(
        KEYED_TENSORS
        + """
for name in GOOD:
    for keys in (0b111, 0, 0b1011, 1 << 63):
        tensors = call(kind=keyed, **{name: {"keys": keys}})
        attempt(lambda: (launcher.signature(*tensors) in launches, launcher.reads(*tensors)))
odd = call(kind=keyed, a={"keys": 8})
bound = launcher.bind(prepared, *call(kind=keyed))
attempt(launcher.launch_known, known, OPTIONS, *odd)
attempt(launcher.bind, prepared, *odd)
attempt(launcher.launch_bound, bound, odd[0], odd[1], odd[4])
attempt(launcher.launch_bound, bound, *(call(kind=keyed)[i] for i in (0, 1, 4)))
"""
    )
    after = lines[lines.index("---") + 1 :]
    assert after[:20] == ["(True, True)", "(True, True)", "(False, False)", "(False, False)"] * 5
    assert after[20:23] == ["False", "None", "False"]
    assert "cuLaunchKernelEx" in "".join(after[23:]) and after[-1] == "True"


def test_reads(run_with_tensors):
    lines = run_with_tensors("""
attempt(launcher.reads)
attempt(launcher.reads, *call(), *call())
attempt(launcher.reads, Typed(0xA00, (1, 2, 3)), Typed(0xB00, (1, 2), device=(2, 1)))
attempt(launcher.reads, *call(), Typed(0, (1, 2), base=0))
attempt(launcher.reads, *call(), 7)
""")
    assert lines == ["True", "True", "True", "False", "False"]


def test_only_registered_types_are_read(run_with_tensors):
    lines = run_with_tensors("""
attempt(launcher.signature, *call(kind=type("Subclass", (Typed,), {})))
attempt(launcher.launch_known, known, OPTIONS, 1, None, "b", [], Typed)
""")
    assert lines == ["None", "False"]


def test_alignment_is_checked_at_every_launch(run_with_tensors):
    lines = run_with_tensors("""
bound = launcher.bind(prepared, *call())
begin()
off = call(a={"address": 0xA08})
attempt(launcher.launch_known, known, OPTIONS, *off)
attempt(launcher.launch_known, known, OPTIONS, *call(b={"address": 0xB0F}))
attempt(launcher.launch_bound, bound, off[0], off[1], off[4])
attempt(launcher.bind, prepared, *call(b={"address": 0xB0F}))
""")
    message = "launch: the address of {} is {} modulo 16, want a multiple of 16 for TMA".format
    assert lines[lines.index("---") + 1 :] == [message("a", 8), message("b", 15), message("a", 8), message("b", 15)]


def test_launches_hold_launches(run_with_tensors):
    lines = run_with_tensors("""
for held in ("launches", (), (OPTIONS, []), ([], launches), (OPTIONS, {key: "launch" for key in launches})):
    attempt(launcher.launch_known, {OPTIONS: held}, OPTIONS, *call())
attempt(launcher.launch_known, known, ([],), *call())
""")
    assert [line.partition(", want")[0] for line in lines[:3]] == [
        "launch_known: the table holds 'launches'",
        "launch_known: the table holds ()",
        "launch_known: the table holds ((1, True, None), [])",
    ]
    assert lines[3].startswith("launch_known: the table holds ([], {b")
    assert lines[4] == "launch_known: prepared is 'launch', want the Launch that prepare() returned"
    assert "unhashable type: 'list'" in lines[5]


def test_options_are_known_by_value_and_type(run_with_tensors):
    """What equals options that have been checked has not been checked itself."""
    lines = run_with_tensors("""
for options in (OPTIONS, (True, True, None), (1.0, True, None), (1, 1, None), (2, True, None), (1, True), ()):
    attempt(launcher.launch_known, known, options, *call())
""")
    assert [line for line in lines if line in ("True", "False")] == ["True"] + ["False"] * 6
    assert sum("cuLaunchKernelEx" in line for line in lines) == 1


def test_launch_bound(run_with_tensors):
    """The weights are those bound."""
    lines = run_with_tensors("""
bound = launcher.bind(prepared, *call(b={"address": 0xBB00}, b_scale={"address": 0xBB4}))
a, a_scale, _, _, out = call(a={"address": 0x1A00}, a_scale={"address": 0x1A4}, out={"address": 0x1C00})
attempt(launcher.launch_bound, bound, a, a_scale, out)
""")
    (launch,) = (line for line in lines if "cuLaunchKernelEx" in line)
    assert "stream 0x5200 " in launch
    assert (
        "maps 700001a00,70000bb00,700001c00 a_scale 0x7000001a4 b_scale 0x700000bb4 out 0x700001c00 "
        "strides 56,1 1,17 2112"
    ) in launch
    assert lines[-1] == "True"


@pytest.mark.parametrize(
    "change",
    [change for change in (*DIFFERENT.values(), *UNREADABLE.values()) if not change.startswith(('{"b"', '{"b_scale"'))],
)
def test_bound_launch_takes_the_like_only(run_with_tensors, change):
    lines = run_with_tensors(f"""
bound = launcher.bind(prepared, *call())
begin()
a, a_scale, _, _, out = call(**{change})
attempt(launcher.launch_bound, bound, a, a_scale, out)
""")
    assert lines[lines.index("---") + 1 :] == ["False"]


def test_launches_may_be_dropped_meanwhile(run_with_tensors):
    """Another thread clears the dict while this one launches from it."""
    lines = run_with_tensors("""
from threading import Thread
kernel, tensors, key = load(), call(), next(iter(launches))
begin()
def work():
    for _ in range(100):
        launches[key] = launcher.prepare(kernel, **LAUNCH)
        launcher.launch_known(known, OPTIONS, *tensors)
        launches.clear()
threads = [Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
""")
    launched = [line for line in lines if line.startswith("cuLaunchKernelEx")]
    assert 100 <= len(launched) <= 400
    assert all("maps 700000a00,700000b00,700000c00 " in line for line in launched)
    assert lines[-1] == "done"


def test_types_without_the_exchange_api(run_on_fake_driver):
    """None of them is read; an older table of the same library is found behind a newer one."""
    out = run_on_fake_driver(
        MADE_UP_TENSORS
        + """
print(launcher.read_tensors_of(int))
for table in (exchange(version=(2, 0)), exchange(version=(0, 8)), exchange(view=None)):
    print(launcher.read_tensors_of(tensor_type(table)))
print(launcher.read_tensors_of(tensor_type(exchange(), name=b"dltensor")))
print(launcher.read_tensors_of(type("Odd", (), {"__dlpack_c_exchange_api__": 7})))
first = exchange()
print(launcher.read_tensors_of(tensor_type(exchange(version=(2, 0), older=ctypes.addressof(first)))))
"""
    )
    assert out.split() == ["False"] * 6 + ["True"]


def test_room_for_few_types(run_on_fake_driver):
    out = run_on_fake_driver(
        MADE_UP_TENSORS
        + """
try:
    for count in range(10):
        launcher.read_tensors_of(tensor_type(table))
except ValueError as error:
    print(count, error)
"""
    )
    assert out == "4 read_tensors_of: there is room for 4 types\n"


# ---- what it believes of DLPack and of the driver


DLPACK_AGREEMENT = """
#include <ATen/dlpack.h>
#include <stddef.h>
#include "csrc/dlpack.h"

#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours)
#define SAME_TYPE(ours, theirs) _Static_assert(__builtin_types_compatible_p(ours, theirs), #ours)
#define SAME_FIELD(type, field, their_type, their_field)                                            \\
    SAME(offsetof(type, field), offsetof(their_type, their_field));                                 \\
    SAME(sizeof((type){0}.field), sizeof((their_type){0}.their_field))

SAME(EXCHANGE_MAJOR_VERSION, DLPACK_MAJOR_VERSION);
SAME(DEVICE_CUDA, kDLCUDA);
SAME(sizeof(TensorView), sizeof(DLTensor));
SAME_FIELD(TensorView, data, DLTensor, data);
SAME_FIELD(TensorView, device.type, DLTensor, device.device_type);
SAME_FIELD(TensorView, device.index, DLTensor, device.device_id);
SAME_FIELD(TensorView, rank, DLTensor, ndim);
SAME_FIELD(TensorView, dtype, DLTensor, dtype);
SAME_FIELD(TensorView, dtype.lanes, DLTensor, dtype.lanes);
SAME_FIELD(TensorView, shape, DLTensor, shape);
SAME_FIELD(TensorView, strides, DLTensor, strides);
SAME_FIELD(TensorView, byte_offset, DLTensor, byte_offset);
SAME_FIELD(Exchange, header.major, DLPackExchangeAPI, header.version.major);
SAME_FIELD(Exchange, header.older, DLPackExchangeAPI, header.prev_api);
SAME_FIELD(Exchange, view, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
SAME_FIELD(Exchange, current_stream, DLPackExchangeAPI, current_work_stream);
SAME_TYPE(DLPackDLTensorFromPyObjectNoSync, int (*)(void *, DLTensor *));
SAME_TYPE(DLPackCurrentWorkStream, int (*)(DLDeviceType, int32_t, void **));
"""


def test_declarations_agree_with_dlpack_h():
    import torch

    include = Path(torch.__file__).parent / "include"
    if "DLPackExchangeAPI" not in (include / "ATen" / "dlpack.h").read_text():
        pytest.skip(f"the dlpack.h of torch {torch.__version__} has no C exchange API")
    options = ["-std=gnu11", "-fsyntax-only", f"-I{ROOT}", f"-I{include}", "-xc", "-"]
    check = subprocess.run([*COMPILER, *options], input=DLPACK_AGREEMENT, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


AGREEMENT = """
#include <cuda.h>
#include <stddef.h>
#include "csrc/driver.h"

#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours)
#define SAME_FIELD(field, their_field) SAME(offsetof(LaunchConfig, field), offsetof(CUlaunchConfig, their_field))

SAME(PROC_ADDRESS_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
SAME(FUNC_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(FUNC_NUM_REGS, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(LAUNCH_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(MAP_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
SAME(MAP_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME(MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME(MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_32B);
SAME(MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_64B);
SAME(MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE);
SAME(MAP_L2_PROMOTION_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME(MAP_OOB_FILL_ZEROS, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME(ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(ERROR_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE);
SAME(ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(ERROR_INVALID_SOURCE, CUDA_ERROR_INVALID_SOURCE);
SAME(ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(ERROR_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME(ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(ERROR_ASSERT, CUDA_ERROR_ASSERT);
SAME(ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME(ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(ERROR_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME(ERROR_INVALID_PC, CUDA_ERROR_INVALID_PC);
SAME(ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
#if CUDA_VERSION >= 13000
SAME(ERROR_CONTAINED, CUDA_ERROR_CONTAINED);
SAME(ERROR_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK);
#endif

SAME(sizeof(LaunchAttribute), sizeof(CUlaunchAttribute));
SAME(offsetof(LaunchAttribute, value), offsetof(CUlaunchAttribute, value));
SAME(sizeof(LaunchConfig), sizeof(CUlaunchConfig));
SAME_FIELD(grid_x, gridDimX);
SAME_FIELD(block_x, blockDimX);
SAME_FIELD(smem_bytes, sharedMemBytes);
SAME_FIELD(stream, hStream);
SAME_FIELD(attributes, attrs);
SAME_FIELD(attribute_count, numAttrs);

#define SAME_SIGNATURE(name, parameters)                                                            \\
    typedef DriverResult our_##name parameters;                                                     \\
    _Static_assert(__builtin_types_compatible_p(our_##name, __typeof__(name)), #name);
DRIVER_CALLS(SAME_SIGNATURE)
_Static_assert(__builtin_types_compatible_p(GetProcAddress, __typeof__(&cuGetProcAddress)), "cuGetProcAddress");
"""


@pytest.mark.skipif(not (CUDA_INCLUDE / "cuda.h").exists(), reason=f"no cuda.h in {CUDA_INCLUDE}")
def test_declarations_agree_with_cuda_h():
    options = ["-std=gnu11", "-fsyntax-only", f"-I{ROOT}", f"-I{CUDA_INCLUDE}", "-xc", "-"]
    check = subprocess.run([*COMPILER, *options], input=AGREEMENT, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
