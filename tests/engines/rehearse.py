"""The plugins within vLLM's and SGLang's own sources, on a machine without a GPU: `make test-engines`.

Their wheels come from the index, without what they depend on, and are unpacked without their compiled parts; what of
the rest is needed to import them is installed beside them, and stand-ins (sitecustomize.py) take the place of the
driver and of compiled parts. Kernels are not compiled and not launched: layers are made, chosen, loaded and called as
vLLM and SGLang do it, and results are deep_tile's for CPU tensors. Takes minutes, and 700 MB of downloads once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

ENGINES = {"vllm-oldest": "vllm==0.26.0", "vllm-newest": "vllm<0.34", "sglang-newest": "sglang<0.6"}

BESIDE = [
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "annotated-types",
    "anyio",
    "apache-tvm-ffi",
    "attrs",
    "blake3",
    "cachetools",
    "cbor2",
    "certifi",
    "charset-normalizer",
    "cloudpickle",
    "compressed-tensors",
    "dill",
    "diskcache",
    "distro",
    "einops",
    "fastapi",
    "frozenlist",
    "gguf",
    "h11",
    "httpcore",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "idna",
    "importlib_metadata",
    "interegular",
    "jiter",
    "lark",
    "loguru",
    "msgspec",
    "multidict",
    "openai",
    "openai-harmony",
    "opentelemetry-api",
    "orjson",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "propcache",
    "protobuf",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "safetensors",
    "setproctitle",
    "six",
    "sniffio",
    "starlette",
    "tokenizers",
    "tqdm",
    "transformers",
    "typing-inspection",
    "urllib3",
    "uvicorn",
    "uvloop",
    "yarl",
    "zipp",
]
"""Packages that the engines import and deep_tile's environment lacks."""

STAND_INS = {
    "vllm": "xgrammar llguidance outlines_core numba",
    "sglang": "IPython cutlass deep_gemm flashinfer llguidance nvtx outlines_core quack sentencepiece sgl_kernel "
    "smg_grpc_servicer torchao torchcodec torchvision triton xgrammar",
}
DEEP_GEMM = "sgl-deep-gemm"
"""Folder of SGLang's DeepGEMM, whose functions the plugin's hooks are put around."""

KINDS = ("dense", "experts", "mxfp4", "gpt_oss", "int4_32", "int4_128")
"""Models that vLLM makes."""

MOST_ERROR = 0.08
"""Largest error of random FP8 layers against dequantised weights."""

MOST_BYTES = 1.06
"""Of packed experts, for one of a checkpoint: a width of 736, as a rank of four has of gpt-oss, is padded to 768."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for packages of the index; kept")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="by default all")
    options = parser.parse_args()
    folder = options.folder.resolve()
    install(folder)
    write_entry_points(folder / "plugin")
    failures = []
    for name in options.engine or ENGINES:
        unpack(folder, name)
        checks = check_vllm if name.startswith("vllm") else check_sglang
        failures += [f"{name}: {failure}" for failure in checks(folder, name)]
        print(name, "done", flush=True)
    print("\n".join(failures) or "all engines are served")
    return 1 if failures else 0


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def install(folder: Path) -> None:
    beside = folder / "beside"
    if not beside.exists():
        pip("install", "--quiet", "--no-deps", "--target", str(beside), *BESIDE)


def unpack(folder: Path, name: str) -> None:
    """Python files of an engine's wheel, at `folder`/`name`, and of the DeepGEMM that SGLang needs."""
    unpack_wheel(folder, folder / name, ENGINES[name])
    if name.startswith("sglang"):
        (engine,) = metadata.distributions(name="sglang", path=[str(folder / name)])
        (pinned,) = [wanted for wanted in engine.requires if wanted.startswith("sgl-deep-gemm")]
        unpack_wheel(folder, folder / DEEP_GEMM, pinned)


def unpack_wheel(folder: Path, target: Path, requirement: str) -> None:
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", downloads, requirement)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [entry for entry in archive.namelist() if not entry.endswith(".so")])


def write_entry_points(folder: Path) -> None:
    """Write deep_tile's entry points as pip would, whatever the environment's own are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "deep_tile-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_tile\nVersion: 0.0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))


def run(folder: Path, name: str, script: str, *arguments: str, **variables: str) -> tuple[dict, str]:
    """Run a script. Returns its result and all its output."""
    engine = name.partition("-")[0]
    path = [HERE, folder / name, folder / "beside", folder / "plugin", ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "ENGINE_REHEARSAL": engine,
        "ENGINE_STAND_INS": STAND_INS[engine],
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        **variables,
    }
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name}: {script} {arguments} ended with {done.returncode}:\n{said[-4000:]}")
    return json.loads(lines[-1].removeprefix("FOUND ")), said


def check_vllm(folder: Path, name: str) -> list[str]:
    failures = []
    for kind, variable in (*((kind, "1") for kind in KINDS), ("dense", "")):
        with tempfile.TemporaryDirectory(dir=folder) as model:
            found, said = run(folder, name, "in_vllm.py", model, kind, VLLM_USE_DEEP_TILE=variable)
        print(name, kind, f"VLLM_USE_DEEP_TILE={variable}", found, flush=True)
        classes = [found[what] for what in ("linear", "experts") if what in found]
        if any(each.startswith("DeepTile") is not bool(variable) for each in classes):
            failures.append(f"{kind}, variable {variable!r}: {classes} serve\n{said[-2000:]}")
        failures += [f"{name} has no {missing}" for name, missing in found["abstract"].items() if missing]
        if found.get("fused_casts", 2) != 2:
            failures.append(f"{kind}: {found['fused_casts']} of a layer's gate and norm have joined a cast")
        if found["has_own_key"] is not bool(variable):
            failures.append(f"{kind}, variable {variable!r}: has_own_key is {found['has_own_key']}")
        failures += [
            f"{kind}: {what} is {found[what]}" for what in found if what[:5] == "error" and found[what] > MOST_ERROR
        ]
    return failures + check_deep_gemm(folder, name)


def check_deep_gemm(folder: Path, name: str) -> list[str]:
    """What deep_tile has by DeepGEMM's names: the engine's indexers on it, and all else that its sources look up."""
    engine, found = name.partition("-")[0], {}
    for script, *arguments in ((f"in_{engine}_indexer.py",), ("names_in_use.py", str(folder / name / engine))):
        found[script], _ = run(folder, name, script, *arguments)
        print(name, script, found[script], flush=True)
    chosen, names = found.values()
    failures = [f"indexer: {part} chooses other keys" for part, right in chosen.items() if not right]
    failures += [f"{used}, of DeepGEMM, is not known at {where}" for used, where in names["unknown"].items()]
    return failures + names["misfits"]


def check_sglang(folder: Path, name: str) -> list[str]:
    wanted = [
        *("configure_deep_gemm_num_sms", "deepgemm_w8a8_block_fp8_linear_with_fallback"),
        *("get_quant_method", "get_quant_method"),
        *("grouped_gemm_nt_f8f8bf16_contig", "grouped_gemm_nt_f8f8bf16_masked"),
    ]
    failures = []
    for variable in ("1", ""):
        found, said = run(folder, name, "in_sglang.py", SGLANG_USE_DEEP_TILE=variable)
        print(name, f"SGLANG_USE_DEEP_TILE={variable}", found, flush=True)
        if found.pop("hooked") != (wanted if variable else []):
            failures.append(f"variable {variable!r}: other functions are hooked\n{said[-2000:]}")
        failures += [f"{what} is false" for what, holds in found.items() if not holds]
    for variable, asked in (("1", "auto"), ("1", "marlin"), ("", "auto")):
        found, _ = run(folder, name, "in_sglang_mxfp4.py", asked, SGLANG_USE_DEEP_TILE=variable)
        print(name, f"SGLANG_USE_DEEP_TILE={variable} --moe-runner-backend {asked}", found, flush=True)
        for kind, layer in found.items():
            serves = layer["method"].startswith("DeepTile")
            if serves is not (variable == "1" and asked == "auto"):
                failures.append(f"{kind}, variable {variable!r}, backend {asked}: {layer['method']} serves")
            if serves and (layer["error"] > MOST_ERROR or layer["bytes"] > MOST_BYTES):
                failures.append(f"{kind}: {layer}")
    once = "--device", "cpu", "--cases", "one", "--layouts"  # experts' layouts are made by Triton
    found, _ = run(folder, name, "in_sglang_layers.py", *once, SGLANG_USE_DEEP_TILE="1")
    print(name, "layers", found, flush=True)
    linear, limit = found["linear, one"], found["limit of SMs"]
    if not (linear["hooked"] and linear["error"] < MOST_ERROR and limit["equal"]):
        failures.append(f"linear layer: {found}")
    stand_ins = STAND_INS["sglang"].replace(" deep_gemm", "")
    served = {"SGLANG_USE_DEEP_TILE": "1", "ENGINE_STAND_INS": stand_ins, "ENGINE_DEEP_GEMM": str(folder / DEEP_GEMM)}
    chosen, _ = run(folder, name, "in_sglang_indexer.py", **served)
    print(name, "indexer by the plugin", chosen, flush=True)
    failures += [f"indexer by the plugin: {part} chooses other keys" for part, right in chosen.items() if not right]
    return failures + check_deep_gemm(folder, name)


if __name__ == "__main__":
    sys.exit(main())
