"""The native launcher, without a GPU: its refusals, and its calls of the driver.

What it asks is seen through fake_driver.c, a libcuda.so.1 that writes every call down. It is loaded in a process of its
own, because a process opens the driver once.
"""

import ast
import ctypes
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import run_python
from pretending import COMPILER, WHOLE_CUBIN, elf, params_of

from deep_tile import _launcher

ROOT = Path(__file__).resolve().parent.parent
CUDA_INCLUDE = Path("/usr/local/cuda/include")

NAMES = ("a", "a_scale", "b", "b_scale", "out")
A_MAP = (128, 0, 0, (7168, 4096), (7168,), (128, 64), 3, 2, 0)
B_MAP = (256, 2, 0, (7168, 2112), (7168,), (128, 96), 3, 2, 0)
OUT_MAP = (384, 4, 9, (2112, 4096), (4224,), (64, 64), 3, 0, 0)
PARAMS_BYTES = 512
LAUNCH = {
    "grid": 132,
    "cluster": 2,
    "threads": 384,
    "params": bytes(range(1, 41)).ljust(PARAMS_BYTES, b"\0"),
    "names": NAMES,
    "pointers": ((40, 1, 0), (48, 3, 0), (56, 4, 0)),
    "maps": (A_MAP, B_MAP, OUT_MAP),
    "fixed_maps": (),
    "pdl": False,
}
"""A launch with five tensors, three of which have maps. Its parameters begin with 40 bytes of numbers."""

# Loads the launcher by its path: importing the package would import torch, which may open the real driver.
PREAMBLE = f"""
import ctypes, importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("_launcher", {_launcher.__file__!r})
launcher = importlib.util.module_from_spec(importlib.util.spec_from_loader("_launcher", loader))
loader.exec_module(launcher)
def opened_libraries():
    return open("/proc/self/maps").read()
"""


# ---- what it is


def test_is_a_stable_abi_extension():
    assert Path(_launcher.__file__).name == "_launcher.abi3.so"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_depends_on_libc_alone():
    dynamic = subprocess.run(["readelf", "-d", _launcher.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed, dynamic
    assert all(re.match(r"(libc|libdl|libpthread|ld-linux.*|libc\.musl.*)\.so", library) for library in needed), needed


def test_stub_agrees():
    """deep_tile/_launcher.pyi has the module's names, with its functions' parameters."""
    stub = ast.parse((ROOT / "deep_tile" / "_launcher.pyi").read_text()).body
    functions = {node.name: node.args for node in stub if isinstance(node, ast.FunctionDef)}
    types = {node.name for node in stub if isinstance(node, ast.ClassDef)}
    assert functions.keys() | types == {name for name in dir(_launcher) if not name.startswith("_")}
    for name, arguments in functions.items():
        variadic = [arguments.vararg] if arguments.vararg else []
        kinds = (arguments.posonlyargs, arguments.args, variadic, arguments.kwonlyargs)
        seen = [(kind, argument.arg) for kind, of_kind in enumerate(kinds) for argument in of_kind]
        parameters = inspect.signature(getattr(_launcher, name)).parameters.values()
        assert seen == [(parameter.kind, parameter.name) for parameter in parameters]
        assert len(arguments.defaults) == sum(parameter.default is not parameter.empty for parameter in parameters)


def test_import_opens_no_driver():
    run = run_python(PREAMBLE + "print('libcuda' in opened_libraries(), '_launcher' in opened_libraries())")
    assert run.stdout.split() == ["False", "True"]


def test_driver_version():
    """The version is the driver's. Without a driver the error says what to do."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match=r"libcuda\.so\.1.*install the NVIDIA driver: 525 or newer"):
            _launcher.driver_version()
    else:
        assert _launcher.driver_version() >= 12000


# ---- what it refuses


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


def with_item(entry: tuple, index: int, item: object) -> tuple:
    return (*entry[:index], item, *entry[index + 1 :])


WRONG_NUMBERS = {
    "grid is 0, want an int from 1 to 2147483647": {"grid": 0},
    "grid is 131, want an int from 1 to 2147483647, a multiple of 2": {"grid": 131},
    "cluster is 9, want an int from 1 to 8": {"cluster": 9},
    "threads is 1025, want an int from 1 to 1024": {"threads": 1025},
    f"threads is {2**80}, want an int from 1 to 1024": {"threads": 2**80},
    "names is (), want 1 to 9 str": {"names": ()},
    "names is ('a', 7), want 1 to 9 str": {"names": ("a", 7)},
    "names is ('a', 'a', 'a', 'a', 'a', 'a', 'a', 'a', 'a', 'a'), want 1 to 9 str": {"names": ("a",) * 10},
    "params has 0 bytes, want 1 to 4096": {"params": b""},
    "params has 4097 bytes, want 1 to 4096": {"params": bytes(4097)},
    "got 17 pointers, 3 maps and 0 fixed_maps, want at most 16": {"pointers": ((0, 0, 0),) * 17},
    "pointers[0].offset is 505, want an int from 0 to 504, a multiple of 8": {"pointers": ((505, 0, 0),)},
    "pointers[1].offset is 44, want an int from 0 to 504, a multiple of 8": {"pointers": ((0, 0, 0), (44, 0, 0))},
    "pointers[0].offset is -8, want": {"pointers": ((-8, 0, 0),)},
    "pointers[0].tensor is 5, want an int from 0 to 4": {"pointers": ((0, 5, 0),)},
    "maps[0].offset is 385, want an int from 0 to 384, a multiple of 64": {"maps": (with_item(A_MAP, 0, 385),)},
    "maps[0].offset is 32, want an int from 0 to 384, a multiple of 64": {"maps": (with_item(A_MAP, 0, 32),)},
    "maps[1].tensor is -1, want an int from 0 to 4": {"maps": (A_MAP, with_item(B_MAP, 1, -1))},
    "maps[0].element is 13, want an int from 0 to 12": {"maps": (with_item(A_MAP, 2, 13),)},
    "maps[0].sizes is (), want 1 ints": {"maps": (with_item(A_MAP, 3, ()),)},
    "maps[0].sizes is (1, 1, 1, 1, 1, 1), want 5 ints": {"maps": (with_item(A_MAP, 3, (1,) * 6),)},
    "maps[0].sizes is 0, want an int from 1 to 4294967296": {"maps": (with_item(A_MAP, 3, (0, 4096)),)},
    "maps[0].sizes is 4294967297, want": {"maps": (with_item(A_MAP, 3, (7168, 2**32 + 1)),)},
    "maps[0].strides_bytes is (7168, 16), want 1 ints": {"maps": (with_item(A_MAP, 4, (7168, 16)),)},
    "maps[0].strides_bytes is 7176, want an int from 16 to 1099511627760, a multiple of 16": {
        "maps": (with_item(A_MAP, 4, (7176,)),)
    },
    "maps[0].strides_bytes is 1099511627776, want": {"maps": (with_item(A_MAP, 4, (2**40,)),)},
    "maps[0].box is (128,), want 2 ints": {"maps": (with_item(A_MAP, 5, (128,)),)},
    "maps[0].box is 257, want an int from 1 to 256": {"maps": (with_item(A_MAP, 5, (128, 257)),)},
    "maps[0].box has rows of 24 bytes, want a multiple of 16, at most 128": {"maps": (with_item(A_MAP, 5, (24, 64)),)},
    "maps[2].box has rows of 144 bytes, want": {"maps": (A_MAP, B_MAP, with_item(OUT_MAP, 5, (72, 64)))},
    "maps[0].swizzle is 4, want an int from 0 to 3": {"maps": (with_item(A_MAP, 6, 4),)},
    "maps[0].l2_promotion is 4, want an int from 0 to 3": {"maps": (with_item(A_MAP, 7, 4),)},
    "maps[0].skip is 8, want an int from -281474976710656 to 4294967280, a multiple of 16": {
        "maps": (with_item(A_MAP, 8, 8),)
    },
    "pointers[0].skip is -1, want an int from 0 to 4294967295": {"pointers": ((0, 0, -1),)},
    "fixed_maps[0].address is 0, want an int from 16 to": {"fixed_maps": (with_item(A_MAP, 1, 0),)},
    "fixed_maps[0].address is 24, want an int from 16 to": {"fixed_maps": (with_item(A_MAP, 1, 24),)},
}
WRONG_TYPES = {
    "grid is 132.0, want an int": {"grid": 132.0},
    "want pointers that are tuples (offset, tensor, skip)": {"pointers": (40,)},
    "want maps that are tuples (offset, tensor or address, element, sizes": {"maps": (A_MAP[:-1],)},
    "strides_bytes and box are tuples": {"maps": (with_item(A_MAP, 5, [128, 64]),)},
    "maps[0].box is '128', want an int": {"maps": (with_item(A_MAP, 5, ("128", 64)),)},
}


def test_prepare_names_what_is_wrong(run_on_fake_driver):
    """No map is encoded before all arguments are right."""
    changes = [*WRONG_NUMBERS.values(), *WRONG_TYPES.values()]
    out = run_on_fake_driver(f"""
kernel = load()
begin()
for change in {changes!r}:
    try:
        print(launcher.prepare(kernel, **LAUNCH | change))
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
""")
    lines = out.split("---\n")[1].splitlines()
    for kind, message, line in zip(
        ["ValueError"] * len(WRONG_NUMBERS) + ["TypeError"] * len(WRONG_TYPES),
        [*WRONG_NUMBERS, *WRONG_TYPES],
        lines,
        strict=True,
    ):
        assert line.startswith(f"{kind} prepare: ") and message in line, line


def test_prepare_wants_a_kernel():
    with pytest.raises(TypeError, match="kernel is None, want the Kernel that load"):
        _launcher.prepare(None, **LAUNCH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "launch: want prepared, a tuple of addresses, stream; got 0 arguments"),
        ((None, [1], 0), "launch: want prepared, a tuple of addresses"),
        ((None, (1,), 0), "launch: prepared is None, want the Launch that prepare() returned"),
    ],
)
def test_launch_names_the_wrong_argument(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        _launcher.launch(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("signature", (), "signature: got 0 arguments, want 1 to 9 tensors"),
        ("signature", range(10), "signature: got 10 arguments, want 1 to 9 tensors"),
        ("launch_known", ({}, ()), "launch_known: want a dict, a tuple and 1 to 9 tensors; got 2 arguments"),
        ("launch_known", ([], (), 1, 2, 3, 4, 5), "launch_known: want a dict"),
        ("launch_known", ({}, [], 1, 2, 3, 4, 5), "launch_known: want a dict, a tuple"),
        ("read_tensors_of", (7,), "read_tensors_of: got 7, want a type"),
        ("read_tensors_of", (int, "16", 168, 1), "cannot be interpreted as an integer"),
    ],
)
def test_tensor_calls_name_the_wrong_argument(name, arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(_launcher, name)(*arguments)


@pytest.mark.parametrize("name", ["Kernel", "Launch"])
def test_handles_cannot_be_made_by_hand(name):
    with pytest.raises(TypeError, match="cannot create"):
        getattr(_launcher, name)()


# ---- what it asks of the driver


@pytest.fixture
def run_on_fake_driver(fake_driver):
    """Runs code that knows `launcher`, `load()`, `LAUNCH`, `ADDRESSES` and `fake`; its output holds a line per call."""
    setup = f"""
fake = ctypes.CDLL({str(fake_driver)!r}, mode=ctypes.RTLD_GLOBAL)
ctypes.c_uint.in_dll(fake, "fake_params_bytes").value = {PARAMS_BYTES}
LAUNCH = {LAUNCH!r}
ADDRESSES = (0xA00, 0xA4, 0xB00, 0xB4, 0xC00)
def with_address(name, address):
    return tuple(address if name == other else given for other, given in zip({NAMES!r}, ADDRESSES))
def load(device=0):
    return launcher.load({WHOLE_CUBIN!r}, "gemm", 200_000, device)
def begin():
    print("---", flush=True)
"""

    def run(code: str, **environment: str) -> str:
        return run_python(PREAMBLE + setup + code, **environment).stdout

    return run


def word(params: bytes, at: int) -> int:
    return int.from_bytes(params[at : at + 8], "little")


def addresses_of(line: str) -> dict[str, int]:
    """The addresses in a launch of LAUNCH: its pointers, and those in its maps."""
    params = params_of(line)
    places = {"a map": 128, "a_scale": 40, "b map": 256, "b_scale": 48, "out": 56, "out map": 384}
    return {name: word(params, at) for name, at in places.items()}


def test_load_leaves_nothing_for_the_launch(run_on_fake_driver):
    """The kernel is loaded in the device's primary context, and that context is left again."""
    out = run_on_fake_driver("""
kernel = load(device=3)
begin()
print(kernel.name, kernel.device)
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
        "cuCtxPopCurrent ",
    ]
    assert attributes.split() == ["gemm", "3", "read-only"]


def test_prepare_encodes_maps(run_on_fake_driver):
    """Maps are encoded in the kernel's context, which is left again, also in a thread without one."""
    out = run_on_fake_driver("""
from threading import Thread
kernel = load()
begin()
thread = Thread(target=lambda: print(launcher.prepare(kernel, **LAUNCH)))
thread.start()
thread.join()
""")
    *calls, prepared = out.split("---\n")[1].splitlines()
    assert calls == [
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
    assert prepared.startswith("<deep_tile._launcher.Launch")


def test_every_step_finds_the_context_that_it_needs(run_on_fake_driver):
    """Threads without a context, and with another GPU's, which they get back."""
    out = run_on_fake_driver("""
from threading import Thread
kernel, other = load(), ctypes.c_void_p(0xC1)
def work(begin):
    begin()
    launcher.launch(launcher.prepare(kernel, **LAUNCH), ADDRESSES, 0x57)
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


def test_types_are_the_process_own(run_on_fake_driver):
    """An import under another name finds the same types, and takes objects of the first one."""
    out = run_on_fake_driver("""
spec = importlib.util.spec_from_file_location("another._launcher", loader.path)
another = importlib.util.module_from_spec(spec)
spec.loader.exec_module(another)
print(another is launcher, another.Kernel is launcher.Kernel, another.Launch is launcher.Launch)
another.launch(another.prepare(load(), **LAUNCH), ADDRESSES, 0)
""")
    assert "False True True" in out and "cuLaunchKernelEx" in out


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_maps_of_any_rank(run_on_fake_driver, rank):
    sizes, strides, box = (64, 7, 6, 5, 4)[:rank], (128, 1024, 8192, 65536)[: rank - 1], (64, 1, 2, 3, 4)[:rank]
    out = run_on_fake_driver(f"""
prepared = launcher.prepare(load(), **LAUNCH | {{"maps": ((128, 0, 9, {sizes}, {strides}, {box}, 3, 1, 0),)}})
launcher.launch(prepared, (0xA00, 1, 2, 3, 4), 0)
""")
    params = params_of(next(line for line in out.splitlines() if line.startswith("cuLaunchKernelEx")))
    words = [word(params, 128 + 8 * i) for i in range(16)]
    assert words[:2] == [0xA00, 9 << 32 | rank << 24 | 3 << 8 | 1 << 4]
    assert words[2 : 2 + rank] == [*sizes]
    assert words[7 : 6 + rank] == [*strides]
    assert words[11 : 11 + rank] == [1 << 32 | side for side in box]


def test_a_tensor_goes_wherever_it_is_wanted(run_on_fake_driver):
    """Into several pointers and maps, or into none."""
    out = run_on_fake_driver("""
maps = [(at, 2, 0, (128, 64), (128,), (128, 64), 3, 2, 0) for at in (128, 256)]
change = {"names": ("x", "unused", "y"), "pointers": ((0, 0, 0), (64, 0, 0), (8, 2, 0)), "maps": tuple(maps)}
launcher.launch(launcher.prepare(load(), **LAUNCH | change), (0xA00, 0xB00, 0xC00), 0)
""")
    params = params_of(out.splitlines()[-2])
    assert [word(params, at) for at in (0, 8, 64, 128, 256)] == [0xA00, 0xC00, 0xA00, 0xC00, 0xC00]
    assert params[16:40] == LAUNCH["params"][16:40]


def test_part_of_a_tensor_is_an_operand(run_on_fake_driver):
    """Pointers, maps and fixed maps begin `skip` bytes into their tensors."""
    out = run_on_fake_driver(f"""
maps, fixed = ({with_item(A_MAP, 8, 0x400)},), ({with_item(with_item(B_MAP, 1, 0xB00), 8, 0x30)},)
change = {{"names": ("a",), "pointers": ((56, 0, 0x2004),), "maps": maps, "fixed_maps": fixed}}
launcher.launch(launcher.prepare(load(), **LAUNCH | change), (0xA00,), 0)
""")
    addresses = addresses_of(out.splitlines()[-2])
    assert (addresses["a map"], addresses["b map"], addresses["out"]) == (0xE00, 0xB30, 0x2A04)


CHAIN = """
first = launcher.prepare(load(), **LAUNCH | {"pdl": False})
second = launcher.prepare(load(), **LAUNCH | {"pdl": True})
"""


def test_launches_of_a_tuple_follow_each_other(run_on_fake_driver):
    """All run in one context, on one stream."""
    out = run_on_fake_driver(CHAIN + "begin()\nlauncher.launch((first, second, first), ADDRESSES, 77)\n")
    lines = [line for line in out.split("---\n")[1].splitlines() if not line.startswith("cuTensorMap")]
    assert [line.split()[0] for line in lines] == [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        *["cuLaunchKernelEx"] * 3,
        "cuCtxPopCurrent",
    ]
    assert [params_of(line) for line in lines[2:5]] == [params_of(lines[2])] * 3
    assert ["pdl 1" in line for line in lines[2:5]] == [False, True, False]


def test_a_tuple_of_launches_is_refused_as_a_whole(run_on_fake_driver):
    """Nothing is launched if the last launch cannot use an address, or an element is no launch."""
    code = """
other = launcher.prepare(load(), **LAUNCH | {"names": ("a",), "pointers": (), "maps": ()})
unaligned = launcher.prepare(load(), **LAUNCH | {"maps": ()})
begin()
for chain in ((unaligned, first), (first, other), (first, None), (), (first,) * 5, [first]):
    try:
        launcher.launch(chain, with_address("a", 0xA08), 0)
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
"""
    lines = run_on_fake_driver(CHAIN + code).split("---\n")[1].splitlines()
    wanted = "prepared is {}, want the Launch that prepare() returned, or a tuple of 1 to 4 of them"
    assert lines[:4] == [
        "ValueError launch: the address of a is 8 modulo 16, want a multiple of 16 for TMA",
        "TypeError launch: got 5 tensors, want 1: ('a',)",
        f"TypeError launch: {wanted.format('None')}",
        f"TypeError launch: {wanted.format('()')}",
    ]
    assert all(line.startswith("TypeError launch: prepared is ") for line in lines[4:]) and len(lines) == 6


def test_the_first_failure_ends_a_tuple_of_launches(run_on_fake_driver):
    code = """
try:
    launcher.launch((first, second), ADDRESSES, 0)
except RuntimeError as error:
    print("error:", error, flush=True)
"""
    out = run_on_fake_driver(CHAIN + code, FAKE_DRIVER_FAIL="cuLaunchKernelEx=1")
    assert sum(line.startswith("cuLaunchKernelEx 0x") for line in out.splitlines()) == 1
    assert "error: cuLaunchKernelEx failed for kernel gemm" in out
    assert out.count("cuCtxPushCurrent") == out.count("cuCtxPopCurrent")


def test_fixed_maps_keep_their_address(run_on_fake_driver):
    out = run_on_fake_driver(f"""
fixed = ({with_item(B_MAP, 1, 0xB00)},)
change = {{"names": ("a", "out"), "pointers": ((56, 1, 0),), "maps": ({A_MAP},), "fixed_maps": fixed}}
prepared = launcher.prepare(load(), **LAUNCH | change)
begin()
launcher.launch(prepared, (0xA00, 0xC02), 0)
""")
    lines = out.split("---\n")[1].splitlines()
    assert [line.split()[1] for line in lines if line.startswith("cuTensorMapReplaceAddress")] == ["0xa00"]
    addresses = addresses_of(lines[-2])
    assert (addresses["a map"], addresses["b map"], addresses["out"]) == (0xA00, 0xB00, 0xC02)


def test_launch_from_a_thread_without_a_context(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
begin()
launcher.launch(prepared, (0xA00, 0xA5, 0xB00, 0xB5, 0xC00), 0x57)
""")
    *before, launched, after = out.split("---\n")[1].splitlines()
    assert before == [
        "cuCtxGetCurrent ",
        "cuCtxPushCurrent 0xc0",
        "cuTensorMapReplaceAddress 0xa00 misaligned 0",
        "cuTensorMapReplaceAddress 0xb00 misaligned 0",
        "cuTensorMapReplaceAddress 0xc00 misaligned 0",
    ]
    assert after == "cuCtxPopCurrent "
    assert launched.startswith(
        "cuLaunchKernelEx 0xf context 0xc0 grid 132,1,1 block 384,1,1 smem 200000 stream 0x57 attributes 1 cluster 2 "
        "pdl 0 extra (nil) params "
    )
    assert params_of(launched)[:40] == LAUNCH["params"][:40]
    assert addresses_of(launched) == {
        "a map": 0xA00,
        "a_scale": 0xA5,
        "b map": 0xB00,
        "b_scale": 0xB5,
        "out": 0xC00,
        "out map": 0xC00,
    }


def test_launch_in_the_right_context_leaves_it_alone(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
fake.cuCtxPushCurrent(ctypes.c_void_p(0xC0))
begin()
launcher.launch(prepared, ADDRESSES, 0)
""")
    calls = [line.split()[0] for line in out.split("---\n")[1].splitlines()]
    assert calls == ["cuCtxGetCurrent", *["cuTensorMapReplaceAddress"] * 3, "cuLaunchKernelEx"]


def test_other_contexts_come_back(run_on_fake_driver):
    """A thread that uses another GPU gets its context back from each call that needs the kernel's."""
    out = run_on_fake_driver("""
fake.cuCtxPushCurrent(ctypes.c_void_p(0xAA))
launcher.launch(launcher.prepare(load(), **LAUNCH), ADDRESSES, 0)
current = ctypes.c_void_p()
fake.cuCtxGetCurrent(ctypes.byref(current))
print(hex(current.value))
""")
    assert out.splitlines()[-1] == "0xaa"
    assert out.count("cuCtxPushCurrent 0xc0") == out.count("cuCtxPopCurrent") == 3


@pytest.mark.parametrize(
    ("cluster", "pdl", "attributes"),
    [
        (1, False, "attributes 0 cluster 0 pdl 0"),
        (1, True, "attributes 1 cluster 0 pdl 1"),
        (2, True, "attributes 2 cluster 2 pdl 1"),
    ],
)
def test_launch_attributes(run_on_fake_driver, cluster, pdl, attributes):
    out = run_on_fake_driver(f"""
prepared = launcher.prepare(load(), **LAUNCH | {{"cluster": {cluster}, "pdl": {pdl}}})
launcher.launch(prepared, ADDRESSES, 0)
""")
    assert attributes in out


def test_launch_refuses_what_no_kernel_can_use(run_on_fake_driver):
    """Tensors that have maps need alignment, and all need memory; nothing reaches the driver."""
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH)
begin()
good = (16, 1, 32, 1, 48)
calls = [((24, 1, 32, 1, 48), 0), ((16, 1, 31, 1, 48), 0), ((16, 1, 32, 1, 50), 0), ((0, 1, 32, 1, 48), 0)]
calls += [((16, 1, 32, 0, 48), 0), ((16, 1.5, 32, 1, 48), 0), ((16, 1, 32, 1, -1), 0), (good, 2**64), (good[:4], 0)]
for call in calls:
    try:
        launcher.launch(prepared, *call)
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
""")
    memory = "is 0, want that of memory: pass a tensor whose storage is allocated"
    assert out.split("---\n")[1].splitlines() == [
        "ValueError launch: the address of a is 8 modulo 16, want a multiple of 16 for TMA",
        "ValueError launch: the address of b is 15 modulo 16, want a multiple of 16 for TMA",
        "ValueError launch: the address of out is 2 modulo 16, want a multiple of 16 for TMA",
        f"ValueError launch: the address of a {memory}",
        f"ValueError launch: the address of b_scale {memory}",
        "TypeError launch: a_scale is 1.5, want an address (an int of 64 bits, not negative)",
        "TypeError launch: out is -1, want an address (an int of 64 bits, not negative)",
        f"TypeError launch: stream is {2**64}, want an address (an int of 64 bits, not negative)",
        f"TypeError launch: got 4 tensors, want 5: {NAMES}",
    ]


def test_out_needs_alignment_only_for_its_map(run_on_fake_driver):
    out = run_on_fake_driver("""
prepared = launcher.prepare(load(), **LAUNCH | {"maps": LAUNCH["maps"][:2]})
begin()
launcher.launch(prepared, (16, 1, 32, 1, 0xC02), 0)
""")
    addresses = addresses_of(out.splitlines()[-2])
    assert (addresses["out"], addresses["out map"]) == (0xC02, 0)


@pytest.mark.parametrize("name", ["a", "a_scale", "b", "b_scale", "out"])
def test_no_launch_without_memory(run_on_fake_driver, name):
    """TMA or the kernel itself would use the address."""
    out = run_on_fake_driver(f"""
kernel = load()
for maps in (LAUNCH["maps"], LAUNCH["maps"][:2]):
    prepared = launcher.prepare(kernel, **LAUNCH | {{"maps": maps}})
    try:
        launcher.launch(prepared, with_address({name!r}, 0), 0)
    except ValueError as error:
        print(error, flush=True)
""")
    message = f"launch: the address of {name} is 0, want that of memory: pass a tensor whose storage is allocated"
    assert out.splitlines().count(message) == 2
    assert "cuTensorMapReplaceAddress" not in out and "cuLaunchKernelEx" not in out


def test_threads_do_not_share_a_launch(run_on_fake_driver):
    """Each line of a launch shows the addresses of one caller."""
    out = run_on_fake_driver("""
from threading import Thread
prepared = launcher.prepare(load(), **LAUNCH)
def work(base):
    for call in range(100):
        launcher.launch(prepared, tuple(base + 16 * i for i in range(1, 6)), base)
threads = [Thread(target=work, args=(0x1000 * (i + 1),)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    launches = [line for line in out.splitlines() if line.startswith("cuLaunchKernelEx")]
    assert len(launches) == 400
    for line in launches:
        base = int(re.search(r"stream (\w+)", line)[1], 16)
        offsets = {name: address - base for name, address in addresses_of(line).items()}
        assert offsets == {"a map": 16, "a_scale": 32, "b map": 48, "b_scale": 64, "out": 80, "out map": 80}


@pytest.mark.parametrize(
    ("call", "failure", "message"),
    [
        ("load()", "cuInit=100",
         r"cuInit failed for kernel gemm: .*\(100\).*; no NVIDIA GPU is visible: check nvidia-smi"),
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
)  # fmt: skip
def test_driver_failures_say_what_and_why(run_on_fake_driver, call, failure, message):
    code = f"""
def launch():
    launcher.launch(launcher.prepare(load(), **LAUNCH), ADDRESSES, 0)
try:
    {call}
except RuntimeError as error:
    print("error:", error, flush=True)
"""
    out = run_on_fake_driver(code, FAKE_DRIVER_FAIL=failure)
    assert re.search("error: .*" + message, out), out
    assert out.count("cuCtxPushCurrent") == out.count("cuCtxPopCurrent"), "the caller's context must come back"


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"])
@pytest.mark.parametrize(
    "result", [214, 220, 226, 700, 702, 710, *range(714, 720), 721], ids=lambda result: f"error {result}"
)
def test_failures_of_earlier_kernels_are_not_this_calls(run_on_fake_driver, call, result):
    """Such errors stick to the context: the next call, whichever it is, reports them."""
    out = run_on_fake_driver(
        """
try:
    launcher.launch(launcher.prepare(load(), **LAUNCH), ADDRESSES, 0)
except RuntimeError as error:
    print("error:", error, flush=True)
""",
        FAKE_DRIVER_FAIL=f"{call}={result}",
    )
    assert out.splitlines()[-1] == (
        f"error: an earlier kernel of this process failed: CUDA_ERROR_NAME ({result}), the driver's text; "
        f"{call} for kernel gemm only met it. CUDA is of no more use to this process: start another, and find "
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
GPU_MEMORY = 0x700000000

MADE_UP_TENSORS = f"GPU_MEMORY = {GPU_MEMORY}" + """
class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int * 2), ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]

class Tensor:
    def __init__(self, address, shape, strides=None, dtype=(10, 8), device=(2, 0), offset=0, memory=True,
                 base=GPU_MEMORY):
        self.view = View(base + address, device, len(shape), (*dtype, 1, 0), byte_offset=offset)
        strides = strides or (shape[-1] if shape else 1, 1, 1)[: len(shape)]
        self.sizes = [(ctypes.c_int64 * len(shape))(*x) for x in (shape, strides)]
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
"""  # fmt: skip

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
    """The signature finds the launch; addresses, offsets and the stream are the call's."""
    lines = run_with_tensors("""
attempt(launcher.launch_known, known, OPTIONS, *call(a={"address": 0x1A00}, out={"address": 0xB00, "offset": 0x100}))
""")
    assert [line.split()[0] for line in lines[2:5]] == ["cuTensorMapReplaceAddress"] * 3
    assert "stream 0x5200 " in lines[5]
    addresses = [address - GPU_MEMORY for address in addresses_of(lines[5]).values()]
    assert addresses == [0x1A00, 0xA4, 0xB00, 0xB4, 0xC00, 0xC00]
    assert lines[6:] == ["cuCtxPopCurrent ", "True"]


def test_launch_known_takes_a_tuple_of_launches(run_with_tensors):
    lines = run_with_tensors("""
launches[launcher.signature(*call())] = (prepared, prepared)
attempt(launcher.launch_known, known, OPTIONS, *call())
""")
    launched = [line for line in lines if line.startswith("cuLaunchKernelEx")]
    assert len(launched) == 2 and launched[0] == launched[1] and lines[-1] == "True"


DIFFERENT = {
    "dtype": '{"a": {"dtype": (12, 8)}}',
    "bits": '{"b_scale": {"dtype": (2, 16)}}',
    "rows": '{"a": {"shape": (4095, 7168)}}',
    "columns": '{"b": {"shape": (2112, 7040), "strides": (7168, 1)}}',
    "row stride": '{"out": {"strides": (2120, 1)}}',
    "column stride": '{"a_scale": {"strides": (1, 4096)}}',
    **{
        f"alignment of {name}": f'{{"{name}": {{"address": 0xD08 if GOOD["{name}"]["address"] % 16 == 0 else 0xD00}}}}'
        for name in NAMES
    },
    "rank": '{"a": {"shape": (4096, 7168, 1), "strides": (7168, 1, 1)}}',
    "device": '{name: {"device": (2, 1)} for name in GOOD}',
    "kind of device": '{name: {"device": (1, 0)} for name in GOOD}',
}
UNREADABLE = {
    "rank": '{"a": {"shape": (4096, 8, 7, 2, 64), "strides": (7168, 896, 128, 64, 1)}}',
    "other device": '{"b": {"device": (2, 1)}}',
    "unknown to DLPack": '{"out": {"memory": False}}',
    **{f"no memory, {name}": f'{{"{name}": {{"address": 0, "base": 0}}}}' for name in ("a", "a_scale", "b", "out")},
    "freed memory": '{"b_scale": {"address": 0, "base": 0, "offset": 0xFFFFFFFF}}',
    "no memory on the CPU": '{name: {"device": (1, 0), "address": 0, "base": 0} for name in GOOD}',
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_every_difference_is_another_signature(run_with_tensors, change):
    """Such a call does not reach the driver."""
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
""")
    assert lines == ["False", "None"]


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
    code = """
for name in GOOD:
    for keys in (0b111, 0, 0b1011, 1 << 63):
        tensors = call(kind=keyed, **{name: {"keys": keys}})
        attempt(lambda: (launcher.signature(*tensors) in launches, launcher.reads(*tensors)))
attempt(launcher.launch_known, known, OPTIONS, *call(kind=keyed, a={"keys": 8}))
attempt(launcher.launch_known, known, OPTIONS, *call(kind=keyed))
"""
    lines = run_with_tensors(KEYED_TENSORS + code)
    after = lines[lines.index("---") + 1 :]
    assert after[:20] == ["(True, True)", "(True, True)", "(False, False)", "(False, False)"] * 5
    assert after[20] == "False"
    assert "cuLaunchKernelEx" in "".join(after[21:]) and after[-1] == "True"


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


def test_what_a_known_launch_refuses(run_with_tensors):
    """It is the launch that needs alignment, whatever signature it stands under; without memory there is none."""
    lines = run_with_tensors("""
for change in ({"a": {"address": 0xA08}}, {"b": {"address": 0xB0F}}, {"out": {"address": 0, "base": 0}}):
    tensors = call(**change)
    launches[launcher.signature(*tensors)] = prepared
    attempt(launcher.launch_known, known, OPTIONS, *tensors)
""")
    message = "launch: the address of {} is {} modulo 16, want a multiple of 16 for TMA".format
    assert lines == [message("a", 8), message("b", 15), "False"]


def test_no_sizes_pass_for_a_tensor(run_with_tensors):
    """Sizes and strides that read like the head of a tensor without any: the rank tells the lists apart."""
    lines = run_with_tensors("""
head = int.from_bytes(launcher.signature(Typed(0xA00, ()))[8:], "little")
line, point = Typed(0xA00, (head,), (head,)), Typed(0xA00, ())
print(hex(head), launcher.signature(line, point) == launcher.signature(point, line))
""")
    assert lines == ["0x100000001080a False"]


def test_signatures_of_one_to_nine_tensors(run_with_tensors):
    """No signature is the beginning of another, ranks 0 to 3 differ, and ten tensors are too many."""
    lines = run_with_tensors("""
tensors = ([Typed(0xA00, shape) for shape in ((), (2,), (2, 1), (2, 1, 1))] * 3)[:9]
signatures = [launcher.signature(*tensors[:count]) for count in range(1, 10)]
signatures += [launcher.signature(tensor) for tensor in tensors[1:4]]
print(len(set(signatures)), [len(signature) for signature in signatures[:4]])
nine = launcher.prepare(load(), **LAUNCH | {"names": tuple("abcdefghi"), "maps": ()})
begin()
for launch in (nine, prepared):
    attempt(launcher.launch_known, {(): ((), {signatures[8]: launch})}, (), *tensors)
""")
    assert lines[0] == "12 [16, 40, 80, 136]"
    assert lines[-2:] == ["True", f"launch_known: got 9 tensors, want 5: {NAMES}"]


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
    assert lines[4].startswith("launch_known: prepared is 'launch', want the Launch that prepare() returned")
    assert "unhashable type: 'list'" in lines[5]


def test_options_are_known_by_value_and_type(run_with_tensors):
    """Options that only equal checked ones are not known."""
    lines = run_with_tensors("""
for options in (OPTIONS, (True, True, None), (1.0, True, None), (1, 1, None), (2, True, None), (1, True), ()):
    attempt(launcher.launch_known, known, options, *call())
""")
    assert [line for line in lines if line in ("True", "False")] == ["True"] + ["False"] * 6
    assert sum("cuLaunchKernelEx" in line for line in lines) == 1


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
    assert {addresses_of(line)["b map"] for line in launched} == {GPU_MEMORY + 0xB00}
    assert lines[-1] == "done"


def test_types_without_the_exchange_api(run_on_fake_driver):
    """Types without the table are skipped; an older table of the same library is found behind a newer one."""
    code = """
print(launcher.read_tensors_of(int))
for table in (exchange(version=(2, 0)), exchange(version=(0, 8)), exchange(view=None)):
    print(launcher.read_tensors_of(tensor_type(table)))
print(launcher.read_tensors_of(tensor_type(exchange(), name=b"dltensor")))
print(launcher.read_tensors_of(type("Odd", (), {"__dlpack_c_exchange_api__": 7})))
first = exchange()
print(launcher.read_tensors_of(tensor_type(exchange(version=(2, 0), older=ctypes.addressof(first)))))
"""
    assert run_on_fake_driver(MADE_UP_TENSORS + code).split() == ["False"] * 6 + ["True"]


def test_room_for_few_types(run_on_fake_driver):
    code = """
try:
    for count in range(10):
        launcher.read_tensors_of(tensor_type(table))
except ValueError as error:
    print(count, error)
"""
    assert run_on_fake_driver(MADE_UP_TENSORS + code) == "4 read_tensors_of: there is room for 4 types\n"


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


def assert_compiles(text: str, include: Path) -> None:
    options = ["-std=gnu11", "-fsyntax-only", f"-I{ROOT}", f"-I{include}", "-xc", "-"]
    check = subprocess.run([*COMPILER, *options], input=text, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_declarations_agree_with_dlpack_h():
    import torch

    include = Path(torch.__file__).parent / "include"
    if "DLPackExchangeAPI" not in (include / "ATen" / "dlpack.h").read_text():
        pytest.skip(f"the dlpack.h of torch {torch.__version__} has no C exchange API")
    assert_compiles(DLPACK_AGREEMENT, include)


AGREEMENT = """
#include <cuda.h>
#include <stddef.h>
#include "csrc/driver.h"

#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours)
#define SAME_FIELD(field, their_field) SAME(offsetof(LaunchConfig, field), offsetof(CUlaunchConfig, their_field))

SAME(PROC_ADDRESS_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
SAME(FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(LAUNCH_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(MAP_BYTES, sizeof(CUtensorMap));
SAME(MAP_ELEMENTS, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ + 1);
SAME(MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME(MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(MAP_L2_PROMOTION_256B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(MAP_OOB_FILL_ZEROS, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

#if CUDA_VERSION < 13000
#define CUDA_ERROR_CONTAINED ERROR_CONTAINED
#define CUDA_ERROR_TENSOR_MEMORY_LEAK ERROR_TENSOR_MEMORY_LEAK
#endif
#define SAME_ERROR(name, result, remedy) SAME(ERROR_##name, CUDA_ERROR_##name);
DRIVER_ERRORS(SAME_ERROR)

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
    assert_compiles(AGREEMENT, CUDA_INCLUDE)
