"""Kernels that the selector can choose, the properties that each must have with any NVRTC, and its machine code."""

import re
import subprocess
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from cuda.pathfinder import find_nvidia_binary_utility

from deep_tile import jit, sass
from deep_tile.config import GemmConfig
from deep_tile.kinds import QUANTIZED
from deep_tile.select.defaults import deepest_config, default_configs
from deep_tile.select.groups import all_grouped_configs, grouped_configs

FIRST_CONFIGS = (*default_configs(True), *all_grouped_configs())
"""FP8 products with an `out` that TMA can store to, and of groups."""

KINDS_CONFIGS = (
    *default_configs(True, "bf16"),
    *default_configs(False, "bf16"),
    *default_configs(True, "bf16", "fp32"),
    *default_configs(True, "fp8_rows"),
    *default_configs(True, "fp8", "fp32"),
    *default_configs(True, "fp8", "fp16")[::5],
    *default_configs(True, "fp8", QUANTIZED),
    *default_configs(True, "int8"),
    *default_configs(True, "fp16")[::3],
    *default_configs(True, "int8_rows")[::3],
    *default_configs(True, "fp8_1x128", "fp32"),
    *default_configs(True, "fp8_1x128")[1::3],
    *default_configs(False, "fp8_1x128", "fp32")[2::3],
    *default_configs(True, "fp8_1x128", "fp32", True)[::3],
    *default_configs(False, "fp8_1x128", "fp32", True)[1::4],
    *default_configs(True, "bf16", "fp32", True)[2::8],
    *default_configs(True, "bf16", layout="nn")[::3],
    *default_configs(True, "bf16", layout="tn")[1::3],
    *default_configs(False, "fp16", "fp32", layout="tt")[2::4],
    *default_configs(True, "fp8", "bf16", True)[::6],
    *default_configs(False, "bf16", "fp16", True)[1::8],
    *default_configs(True, "fp8_rows_promoted"),
    *default_configs(True, "int8_unscaled")[::2],
    *default_configs(False, "int8_unscaled")[1::6],
    *default_configs(False, "fp8_rows_promoted", "fp32", True)[3::6],
    *default_configs(True, "fp8_rows_e5m2_e4m3")[::8],
    *default_configs(True, "mxfp4")[::3],
    *default_configs(True, "nvfp4")[1::6],
    *default_configs(True, "int4")[1::3],
    *default_configs(False, "nvfp4", "fp32")[2::8],
    *default_configs(True, "int4_32")[::2],
    *default_configs(True, "int4_32", "fp32")[1::4],
    *default_configs(False, "int4_32", "fp32")[2::5],
    *default_configs(False, "int4_32")[5::3],
    *default_configs(True, "int4_32", "fp32", True)[3::5],
    *grouped_configs("offs", True, kind="mxfp4")[1::3],
    *grouped_configs("counts", True, kind="nvfp4")[5:],
    *grouped_configs("offs", True, kind="int4")[::3],
    *grouped_configs("offs", True, kind="int4_32"),
    *grouped_configs("counts", False, kind="int4_32", output="fp32"),
    *grouped_configs("offs", True, kind="bf16"),
    *grouped_configs("counts", False, kind="bf16", operands="nn")[::2],
    *grouped_configs("counts", True, kind="fp16", output="fp32", operands="nn")[1::2],
    *grouped_configs("offs", True, kind="fp8_rows"),
    *grouped_configs("counts", True, kind="fp8_rows_promoted", output="fp32")[::2],
    *grouped_configs("offs", False, kind="fp8_rows_promoted")[1::2],
    *grouped_configs("counts", True, kind="int8")[::2],
    *grouped_configs("offs", False, kind="fp8", output="fp32")[1::2],
    *grouped_configs("offs", True, kind="int8_rows", output="fp16")[::3],
    *grouped_configs("counts", True, kind="int8_unscaled")[1::3],
    *grouped_configs("k_offs", True, True),
    *grouped_configs("k_offs", True, False)[::3],
    *grouped_configs("k_offs", False, True)[1:],
    *grouped_configs("k_offs", False, False)[::2],
    *grouped_configs("k_offs", True, False, output="bf16")[1::3],
    *grouped_configs("k_offs", True, True, output="bf16")[::4],
)
"""Other kinds than FP8 with block scales, and other output formats than BF16. Those left out differ in one word of an
instruction or in how they store."""

FINISHED_CONFIGS = (
    *default_configs(True, "fp8", None, False, "bf16", "none")[::4],
    *default_configs(True, "fp8", None, False, "fp32", "gelu")[::3],
    *default_configs(True, "fp8", None, False, "none", "swiglu")[::3],
    *default_configs(True, "fp8", None, False, "bf16", "silu")[1::4],
    *default_configs(False, "fp8", "fp32", False, "fp16", "gelu_tanh")[::5],
    *default_configs(True, "bf16", None, False, "bf16", "gelu_tanh")[::3],
    *default_configs(True, "bf16", None, False, "fp32", "swiglu")[::4],
    *default_configs(True, "bf16", None, False, "bf16", "gelu", layout="tn")[::8],
    *default_configs(True, "fp8_rows", None, False, "bf16", "gelu")[::3],
    *default_configs(True, "int8", None, False, "fp16", "silu")[1::4],
    *default_configs(True, "fp8_1x128", None, False, "bf16", "silu")[::4],
    *default_configs(True, "fp8_rows_promoted", "fp32", False, "fp32", "gelu")[::4],
    *default_configs(True, "fp8", QUANTIZED, False, "none", "gelu")[::3],
    *default_configs(True, "fp8", QUANTIZED, False, "none", "swiglu")[::3],
    *default_configs(True, "fp8", QUANTIZED, False, "bf16", "relu")[1::3],
    *default_configs(True, "fp8", QUANTIZED, False, "fp32", "silu")[2::3],
    *default_configs(True, "fp8", QUANTIZED, False, "bf16", "gelu_tanh")[1::3],
    *default_configs(True, "fp8_rows", None, False, "bf16", "none")[1::4],
    *default_configs(False, "fp8_rows_e5m2_e5m2", None, False, "bf16", "gelu_tanh")[2::4],
    *default_configs(False, "int8_rows", "fp32", False, "fp32", "none")[3::4],
    *default_configs(True, "int8_unscaled", "bf16", False, "fp32", "silu")[::4],
    *default_configs(True, "mxfp4", None, False, "bf16", "gelu")[1::3],
    *default_configs(True, "mxfp4", None, False, "fp32", "gelu_tanh")[2::4],
    *default_configs(True, "int4_32", None, False, "bf16", "none")[3::4],
    *default_configs(True, "int4_32", None, False, "fp32", "silu")[5::3],
    *default_configs(True, "int4_32", None, False, "none", "swiglu")[6::5],
    *default_configs(False, "int4_32", "fp32", False, "fp16", "gelu_tanh")[4::4],
)
"""Kernels with a bias or an activation: some tiles of each kind with some of both."""

LEGAL_CONFIGS = (
    *(deepest_config(64, block_n, scale_blocks=4) for block_n in (16, 32, 64)),
    *(deepest_config(64, 128, scale_blocks=2, split_k=split_k) for split_k in (2, 8)),
    *(deepest_config(*tile, cluster_n=2) for tile in ((128, 144), (128, 256), (256, 128))),
    deepest_config(64, 256),
    deepest_config(256, 128, split_k=2),
    deepest_config(64, 16, kind="bf16"),
    deepest_config(128, 128, cluster_m=2, cluster_n=2),
    deepest_config(128, 192, cluster_n=4),
    deepest_config(128, 128, cluster_m=4, cluster_n=2),
)
"""Legal configs that no selector chooses but a caller may pass: mechanisms and tiles that the others lack."""

EVERY_CONFIG = (*FIRST_CONFIGS, *default_configs(False), *KINDS_CONFIGS, *FINISHED_CONFIGS, *LEGAL_CONFIGS)

SM_REGISTERS = 64 * 1024

INSTRUCTION_BYTES = 16

PREFETCHED_CODE_BYTES = 66 * 1024
"""Most code that a launch prefetches; of larger code it prefetches nothing. 1024x2112x7168 takes 27.3 us with 66.7 KB
and 27.2 us with 64.5 KB; 86 KB cost 19 % (H200, 2026-11-22 and 24)."""


PACKED_GROUPS_CODE_BYTES = 82 * 1024
"""Most code of groups with packed weights, where two more warp roles walk the group schedule. It exceeds the prefetch
limit: INT4 with a scale per column takes 81 KB."""


def flaws(config: GemmConfig, compiled: jit.Compiled) -> list[str]:
    """The defects of a compiled kernel."""
    usage = jit.resource_usage(compiled.log)
    code_bytes = sum(section.stop - section.start for section in sass.code_sections(compiled.cubin))
    found = [*usage.warnings, *compiled.divergence]
    if usage.spill_store_bytes or usage.spill_load_bytes or usage.stack_bytes:
        found.append(f"spills: {usage}")
    if usage.registers * config.threads > SM_REGISTERS:
        found.append(f"{usage.registers} registers for each of {config.threads} threads")
    if code_bytes > (PACKED_GROUPS_CODE_BYTES if config.is_packed and config.is_grouped else PREFETCHED_CODE_BYTES):
        found.append(f"{code_bytes} bytes of code")
    return found


def disassembly(cubin: bytes, folder: Path) -> list[str]:
    """Instructions as nvdisasm prints them, each with its address."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = jit.disassemble(path)
    if text is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return instruction_lines(text.decode())


def disassemblies(cubins: Iterable[bytes], folder: Path) -> list[list[str]]:
    """Disassemblies of many kernels. One nvdisasm call reads them as one file, a tenth of the work, since most of it is
    start-up. Addresses count from the first kernel, and jumps have no labels.
    """
    disassembler = find_nvidia_binary_utility("nvdisasm")
    if disassembler is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    codes = [cubin[section] for cubin in cubins for section in sass.code_sections(cubin)]
    path = folder / "code"
    path.write_bytes(b"".join(codes))
    command = [disassembler, "--binary", "SM90a", path]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    lines = iter(instruction_lines(text))
    return [list(islice(lines, len(code) // INSTRUCTION_BYTES)) for code in codes]


def instruction_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]
