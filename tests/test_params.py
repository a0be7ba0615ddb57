"""Kernels' arguments: the tables against a C compiler and cuda.h, refusals, and a further operand without C."""

import random
import re
import subprocess

import pytest
from pretending import COMPILER, LETTERS, params_of, unpack
from test_launcher import CUDA_INCLUDE, GPU_MEMORY, MADE_UP_TENSORS, run_on_fake_driver  # noqa: F401

from deep_tile import jit, params, plan
from deep_tile.config import GemmConfig, ceil_div
from deep_tile.kinds import QUANTIZED
from deep_tile.params import Field, MapLayout, Params
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.defaults import deepest_config, default_configs

ODD = Params(
    "OddParams",
    Field("first", "int"),
    Field("pointer", "void*"),
    Field("small", "unsigned"),
    Field("map", params.TENSOR_MAP),
    Field("maps", params.TENSOR_MAP, count=3),
    Field("large", "long long"),
    Field("last", "float"),
)
"""Every type, in an order that needs padding in the middle and at the end."""

TABLES = pytest.mark.parametrize(
    "table", [params.GEMM, params.CAST, params.CAST_OF_ROWS, params.COMBINE, params.SORT, ODD]
)


def some_values(table: Params) -> dict[str, int]:
    """A different number for every field but the maps; where there are limits, the least."""
    numbered = enumerate(field for field in table.fields if not field.is_map)
    return {field.name: i + 1 if field.most is None else field.least for i, field in numbered}


# ---- the layout


def in_c(text: str) -> str:
    """The struct for a C compiler."""
    structs = re.sub(
        r"struct (alignas\(\d+\) )?(\w+) \{(.*?)\n\};", r"typedef struct {\3\n} \1\2;", text, flags=re.DOTALL
    )
    return structs.replace("} alignas(64) TensorMap", "} TensorMap").replace(
        "    unsigned long long opaque", "    _Alignas(64) unsigned long long opaque"
    )


@TABLES
def test_layout_is_the_compilers(table):
    """The offset of every field. The text asserts size and alignment."""
    asserts = [
        f"_Static_assert(offsetof({table.name}, {field.name}) == {table.offsets[field.name]}, {field.name!r});\n"
        f"_Static_assert(sizeof((({table.name} *)0)->{field.name}) == {field.size}, {field.name!r});"
        for field in table.fields
    ]
    head = "#include <assert.h>\n#include <stddef.h>\n#define alignof _Alignof\n"
    text = head + in_c(table.text) + "\n".join(asserts).replace("'", '"')
    options = ["-std=gnu11", "-Wpadded", "-Werror", "-fsyntax-only", "-xc", "-"]
    check = subprocess.run([*COMPILER, *options], input=text, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    assert f"static_assert(sizeof({table.name}) == {table.size}," in table.text
    assert f"static_assert(alignof({table.name}) == {table.alignment}," in table.text


@TABLES
def test_layout_is_nvrtcs(table):
    """NVRTC has no offsetof. The size stands for it, because the text spells out all padding."""
    kernel = f'{table.text}\nextern "C" __global__ void nothing(const __grid_constant__ {table.name} params) {{}}'
    jit.compile_kernel(kernel, "nothing")
    fields = [field for field in table.fields if not field.is_map]
    wrong = kernel.replace(f"    {fields[0].type} {fields[0].name};", f"    {fields[0].type} {fields[0].name}[9];", 1)
    with pytest.raises(jit.CompileError, match="a field lies elsewhere than the host puts it"):
        jit.compile_kernel(wrong, "nothing")


@TABLES
def test_bytes_hold_what_was_given(table):
    values = some_values(table)
    data = table.pack(**values)
    assert len(data) == table.size
    seen = unpack(table, data)
    assert {name: seen[name] for name in values} == values
    assert not any(b"".join(seen[field.name] for field in table.fields if field.is_map))


def test_pointers_and_maps_wait_for_addresses():
    numbers = {field.name: 1 for field in params.GEMM.fields if field.type in LETTERS}
    data = params.GEMM.pack(**numbers)
    assert unpack(params.GEMM, data)["a_scale"] == 0
    assert not any(data[params.GEMM.offsets["a_maps"] : params.GEMM.offsets["bounds"]])
    assert params.GEMM.pointers(params.places(("out", "a", "a_scale"))) == ((64, 0, 0), (48, 2, 0))
    with pytest.raises(KeyError, match="'m'"):
        params.GEMM.pack(**{name: 1 for name in numbers if name != "m"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("m", 0, "m is 0, want 1 to 2147483647"),
        ("n", 2**31, "n is 2147483648, want 1 to 2147483647"),
        ("k", 2**80, f"k is {2**80}, want 1 to 2147483647"),
        ("a_tail_rows", 257, "a_tail_rows is 257, want 0 to 256"),
        ("b_tail_rows", -1, "b_tail_rows is -1, want 0 to 256"),
        ("bulk_scale_columns", -1, "bulk_scale_columns is -1, want 0 to 2147483647"),
        ("raster_rows_log2", 0, "raster_rows_log2 is 0, want 1 to 4"),
        ("last_rows_reciprocal", 2**31 + 1, "last_rows_reciprocal is 2147483649, want 1 to 2147483648"),
        ("a_scale_stride_m", 2**32, "a_scale_stride_m is 4294967296, want 0 to 4294967295"),
        ("out_stride_m", -2112, "out_stride_m is -2112, want 0 to 9223372036854775807"),
        ("b_scale", -1, "b_scale is -1, want 0 to 18446744073709551615"),
    ],
)
def test_pack_names_the_wrong_number(field, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        params.GEMM.pack(**some_values(params.GEMM) | {field: value})


def test_floats_are_rounded_as_in_c():
    for value, wanted in ((1e-4, 1e-4), (1 + 2**-24, 1.0), (1e39, float("inf"))):
        data = params.CAST.pack(**some_values(params.CAST) | {"amax_floor": value})
        assert unpack(params.CAST, data)["amax_floor"] == pytest.approx(wanted, rel=2**-24)


@pytest.mark.skipif(not (CUDA_INCLUDE / "cuda.h").exists(), reason=f"no cuda.h in {CUDA_INCLUDE}")
def test_numbers_of_maps_are_the_drivers():
    names = {
        **{f"DATA_TYPE_{name.upper()}": number for name, number in params._ELEMENTS.items()},
        **{f"SWIZZLE_{f'{size}B' if size else 'NONE'}": number for size, number in params._SWIZZLES.items()},
        **{f"L2_PROMOTION_{f'L2_{size}B' if size else 'NONE'}": n for size, n in params._L2_PROMOTIONS.items()},
    }
    asserts = [f'_Static_assert(CU_TENSOR_MAP_{name} == {number}, "{name}");' for name, number in names.items()]
    asserts.append(f'_Static_assert(sizeof(CUtensorMap) == {params.MAP_BYTES}, "bytes");')
    options = ["-std=gnu11", "-fsyntax-only", f"-I{CUDA_INCLUDE}", "-xc", "-"]
    text = "\n".join(["#include <cuda.h>", *asserts])
    check = subprocess.run([*COMPILER, *options], input=text, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


# ---- what a product fills in

LAYOUT = plan.Layout(7168, 7168, 2112, (56, 1), (1, 17), True)
PROBLEM = GemmProblem(4096, 2112, 7168)
CONFIG = next(config for config in default_configs(True) if config.block_m == 128 and config.cluster == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_scale_strides": (2**19, 1)},
         r"a_scale is more than 1073741823 elements .* strides \(524288, 1\); make it"),
        ({"b_scale_strides": (1, 2**62)}, "b_scale is more than 1073741823 elements from its first"),
        ({"a_scale_strides": (-1, 1)}, r"a_scale .* with strides \(-1, 1\)"),
    ],
)  # fmt: skip
def test_scales_are_within_reach(change, message):
    with pytest.raises(ValueError, match=message):
        plan.pack_params(PROBLEM, CONFIG, LAYOUT._replace(**change), early_b=False)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (PROBLEM, GemmConfig(64, 64, 2)),
        (PROBLEM._replace(groups=Groups("offs", 8, 512)), GemmConfig(64, 64, 2, grouping="offs", store_buffers=1)),
        (PROBLEM._replace(output=QUANTIZED, n=2048), GemmConfig(256, 128, 3, output=QUANTIZED, store_buffers=1)),
    ],
    ids=["dense", "groups", "quantised"],
)
def test_a_kernel_that_may_hang_is_refused_with_another_to_take(problem, config, monkeypatch):
    def refuse(source, name):
        raise jit.DivergenceError(f"{name} may hang. Remedy: another config")

    monkeypatch.setattr(jit, "load_cubin", refuse)
    with pytest.raises(jit.CompileError) as error:
        plan.prepare_launch(problem, config, LAYOUT, 0, pdl=False, constant_weights=False)
    chosen = (plan.cast_config_for if config.quantizes else plan.config_for)(problem)
    assert str(error.value) == (
        f"{config.name} may hang. Remedy: another config; the selector's choice here is {chosen.name}"
    )
    with pytest.raises(jit.CompileError, match="another config$"):
        plan.prepare_launch(problem, chosen, LAYOUT, 0, pdl=False, constant_weights=False)


OF_GROUPS = {"offs": GemmConfig(64, 32, 2, grouping="offs"), "counts": GemmConfig(64, 32, 2, grouping="counts")}


@pytest.mark.parametrize(
    ("problem", "config", "columns"),
    [
        *(
            (GemmProblem(900, 0, 128, groups=Groups(layout, 3, 300)), config, plan.MAX_GROUP_COLUMNS)
            for layout, config in OF_GROUPS.items()
        ),
        (GemmProblem(64 * 17, 0, 128), GemmConfig(64, 16, 4), plan.MAX_TILES // 17),
    ],
    ids=str,
)
def test_tiles_that_a_kernel_cannot_count_are_refused(problem, config, columns):
    """Tiles up to the last number of columns that a kernel can count are taken, and one more is refused."""
    n = columns * config.block_n
    plan.pack_params(problem._replace(n=n), config, LAYOUT, early_b=False)
    with pytest.raises(ValueError, match=rf"n is {n + 1}, .* into {columns + 1} columns.*config with a larger block_n"):
        plan.pack_params(problem._replace(n=n + 1), config, LAYOUT, early_b=False)


def test_one_scale_further_is_not_reached():
    problem, layout = PROBLEM._replace(m=2**30 + 1, k=128), LAYOUT._replace(a_scale_strides=(1, 1))
    with pytest.raises(ValueError, match="a_scale is more than 1073741823 elements from its first"):
        plan.pack_params(problem, CONFIG, layout, early_b=False)


def test_the_furthest_scale_is_reached():
    """The last element may be the last that 32 bits count; values that are never multiplied may be any."""
    for m, k, strides in (
        (3, 7168, (2**29 - 28, 1)),
        (1, 7168, (2**40 + 5, 1)),
        (1, 7168, (0, 2**24)),
        (2**30, 128, (1, 1)),
    ):
        problem, layout = PROBLEM._replace(m=m, k=k), LAYOUT._replace(a_scale_strides=strides)
        packed = unpack(params.GEMM, plan.pack_params(problem, CONFIG, layout, early_b=False))
        assert (packed["a_scale_stride_m"], packed["a_scale_stride_k"]) == tuple(x % 2**32 for x in strides)


@pytest.mark.parametrize(
    ("strides", "aligned", "rows"),
    [((1, 4096), True, 4096), ((1, 4100), True, 4096), ((1, 4096), False, 0), ((1, 4098), True, 0), ((56, 1), True, 0)],
)
def test_scales_that_tma_can_copy(strides, aligned, rows):
    assert plan.bulk_scale_rows(4096, strides, aligned) == rows


@pytest.mark.parametrize(
    ("k", "strides", "aligned", "few_rows", "many_rows"),
    [
        (7168, (56, 1), True, 2, 2),
        (7168, (60, 1), True, 2, 2),
        (7168, (56, 1), False, 1, 0),
        (7168, (57, 1), True, 1, 0),
        (7168, (1, 4096), True, 1, 0),
        (7040, (56, 1), True, 0, 0),
    ],
    ids=["row-major", "padded", "misaligned", "odd stride", "M-major", "odd K"],
)
def test_scales_that_are_read_in_runs(k, strides, aligned, few_rows, many_rows):
    layout = LAYOUT._replace(a_scale_strides=strides, a_scale_aligned=aligned)
    configs = GemmConfig(64, 64, 8), GemmConfig(128, 128, 5)
    assert [plan.scale_runs(PROBLEM._replace(k=k), c, layout) for c in configs] == [few_rows, many_rows]


def test_parts_of_k_are_whole_runs():
    layout = LAYOUT._replace(a_scale_strides=(56, 1), a_scale_aligned=True)
    runs = [plan.scale_runs(PROBLEM._replace(k=k), GemmConfig(64, 64, 4, split_k=2), layout) for k in (1024, 1536)]
    assert runs == [2, 0]


def test_tails_fit_their_boxes():
    """For every default config and cluster the boxes of a last tile hold its rows, and each tile that is not full has
    one."""
    generator = random.Random(26)
    grids = [GemmConfig(128, 96, 2, *cluster) for cluster in ((2, 2), (1, 4), (4, 1), (2, 4), (4, 2))]
    for config in (*default_configs(True), *default_configs(False), *grids):
        for _ in range(20):
            m, n = generator.randint(1, 3000), generator.randint(1, 20_000)
            problem = PROBLEM._replace(m=m, n=n)
            sides = ((m, config.block_m, config.cluster_n), (n, config.block_n, config.cluster_m))
            for tail, (rows, tile_rows, boxes) in zip(plan.operand_tails(problem, config), sides, strict=True):
                left = rows % tile_rows
                assert (tail > 0) == (left > 0)
                assert ceil_div(left, boxes) <= tail <= tile_rows // boxes or tail == left == 0


@pytest.mark.parametrize(("m", "bytes_of_rows"), [(64, 0), (8, 16), (3, 16), (57, 0), (130, 16), (296, 80)])
def test_the_last_box_of_an_m_major_operand_has_its_rows(m, bytes_of_rows):
    """In TMA's 16 bytes, and a part of K where blocks share it."""
    for sharers in (1, 2, 4):
        config = deepest_config(128, 128, cluster_n=sharers, kind="bf16", layout="tn")
        problem = PROBLEM._replace(m=m, n=200, kind="bf16", layout="tn")
        assert plan.operand_tails(problem, config) == (bytes_of_rows // 2, 0)
        boxes = [found.box for _, name, found in plan.tensor_maps(problem, config, LAYOUT) if name == "a"]
        assert boxes == [(128, 64 // sharers), *([(bytes_of_rows, 64 // sharers)] if bytes_of_rows else [])]


@pytest.mark.parametrize(("rows", "tile_rows", "sharers"), [(-1, 64, 1), (95, 48, 3), (100, 20, 2)])
def test_tails_that_do_not_fit_are_refused(monkeypatch, rows, tile_rows, sharers):
    if rows == 100:
        monkeypatch.setattr(plan, "tail_rows", lambda *ignored: 11)
    if rows == 95:
        monkeypatch.setattr(plan, "tail_rows", lambda *ignored: 0)
    with pytest.raises(ValueError, match="b's last tile: its box has"):
        plan._checked_tail("b", rows, tile_rows, sharers)


def test_weights_without_memory_are_refused():
    with pytest.raises(ValueError, match="one of them has no memory"):
        plan.prepare_launch(
            PROBLEM, CONFIG, LAYOUT, 0, pdl=True, constant_weights=False, weights=plan.Weights(0xB00, 0)
        )


# ---- an operand more

TOY = Params(
    "ToyParams",
    Field("count", "int", "elements of each tensor", 1, 1024),
    *(Field(name, "const int*") for name in ("a", "b", "c", "d", "e")),
    Field("out", "int*"),
    Field("bias_map", params.TENSOR_MAP),
)
"""Seven tensors, one of which has a map."""

TOY_TENSORS = ("a", "b", "c", "d", "e", "bias", "out")

TOY_KERNEL = (
    TOY.text
    + r"""
extern "C" __global__ void toy(const __grid_constant__ ToyParams params)
{
    __shared__ alignas(128) int bias[32];
    __shared__ alignas(8) unsigned long long barrier;
    const unsigned at = __cvta_generic_to_shared(&barrier), to = __cvta_generic_to_shared(bias);
    const int i = threadIdx.x;
    if (i == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" ::"r"(at) : "memory");
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {0}], [%2];" ::"r"(to), "l"(&params.bias_map), "r"(at) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at) : "memory");
    if (i < params.count)
        params.out[i] = params.a[i] + params.b[i] + params.c[i] + params.d[i] + params.e[i] + bias[i];
}
"""
)
"""Adds up six of them, 32 elements each."""

TOY_BIAS = MapLayout("int32", (32,), (), (32,), 0)


def prepare_toy(prepare, kernel):
    return prepare(
        kernel,
        grid=1,
        cluster=1,
        threads=32,
        params=TOY.pack(count=32),
        names=TOY_TENSORS,
        pointers=TOY.pointers(params.places(TOY_TENSORS)),
        maps=(TOY_BIAS.entry(TOY.offsets["bias_map"], TOY_TENSORS.index("bias")),),
        fixed_maps=(),
        pdl=False,
    )


def test_seven_tensors_need_no_c(run_on_fake_driver):  # noqa: F811
    """A table and a kernel are all that an operand more takes; the launcher is the one that is built."""
    cubin = jit.compile_kernel(TOY_KERNEL, "toy").cubin
    arguments = {}
    prepare_toy(lambda kernel, **given: arguments.update(given), None)
    out = run_on_fake_driver(
        MADE_UP_TENSORS
        + f"""
ctypes.c_uint.in_dll(fake, "fake_params_bytes").value = {TOY.size}
prepared = launcher.prepare(launcher.load({cubin!r}, "toy", 0, 0), **{arguments!r})
launcher.read_tensors_of(Typed)
tensors = [Typed(0x1000 * i, (32,), dtype=(0, 32)) for i in range(1, 8)]
known = {{(): ((), {{launcher.signature(*tensors): prepared}})}}
print(launcher.launch_known(known, (), *tensors))
"""
    )
    *lines, launched = out.splitlines()
    assert launched == "True"
    argument = unpack(TOY, params_of(next(line for line in lines if line.startswith("cuLaunchKernelEx"))))
    bias = int.from_bytes(argument.pop("bias_map")[:8], "little")
    addresses = [address - GPU_MEMORY for name, address in argument.items() if name != "count"]
    assert argument["count"] == 32 and [*argument][1:] == ["a", "b", "c", "d", "e", "out"]
    assert addresses == [0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x7000]
    assert bias == GPU_MEMORY + 0x6000


@pytest.mark.gpu
def test_seven_tensors_on_a_gpu():
    import torch

    from deep_tile import _launcher, launches

    device = torch.cuda.current_device()
    kernel = _launcher.load(jit.compile_kernel(TOY_KERNEL, "toy").cubin, "toy", 0, device)
    prepared = prepare_toy(_launcher.prepare, kernel)
    given = [torch.randint(-1000, 1000, (32,), dtype=torch.int32, device="cuda") for _ in TOY_TENSORS]
    launches.launch(prepared, *given)
    assert torch.equal(given[-1], sum(given[:-1]))
    given[-1].zero_()
    if launches.signature(*given).__class__ is bytes:
        assert _launcher.launch_known({(): ((), {launches.signature(*given): prepared})}, (), *given)
        assert torch.equal(given[-1], sum(given[:-1]))
