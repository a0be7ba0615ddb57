"""vLLM on a Hopper GPU, with deep_tile and without, in turns: what they say, and how long it takes.

    python tests/engines/serve.py [--out results.json]     # where vLLM and deep_tile are installed by pip

Engines are processes of vLLM's defaults, with torch.compile and CUDA graphs, that serve the same model of random FP8
weights: Qwen3-8B's shape, then Qwen3-30B-A3B's. deep_tile's starts in the compile cache that the other has filled.
A third serves the same weights with activations in BF16: log-probabilities of a prompt may hardly be further from its
own with deep_tile than with vLLM's kernels. No kernel may be compiled while deep_tile's engine serves, at whatever
number of tokens, and a profile must show its kernels, and none of them in the other engine. Both are timed by turns,
each number of tokens in several rounds; medians are printed, and their ratio.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "dense": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "experts": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
}
"""Sizes of Qwen3-8B, and of Qwen3-30B-A3B with 16 of its 48 layers, so that three engines fit into 80 GB."""

MOST_TOKENS = 8192
DECODES, TOKENS, PREFILLS = (1, 32), 48, (2048, 8192)
NEW_LENGTHS = (5, 77, 300, 777, 1500, 3001, 5500, 7001)
"""Prompt lengths that an engine has not seen."""
ROUNDS, REPEATS = 4, 3
PROFILES = {"decode of 1": (1, 1, 8), "decode of 32": (32, 1, 8), "prefill of 2048": (1, 2048, 1)}
"""Prompts, tokens of each, and tokens to make: steps of one number of tokens."""
OURS = ("fp8_gemm_", "fp8_cast_", "fp8_combine_", "sort_by_expert_")
"""How names of its kernels begin."""
MORE_DIFFERENCE = 1.1
"""Largest difference of log-probabilities from BF16, as a multiple of vLLM's own kernels'."""


# ---- within an engine


class Worker:
    """Requests to vLLM's worker beyond its own (`worker_extension_cls`)."""

    def compilations(self) -> int:
        import deep_tile

        return deep_tile.compilations()

    def classes(self) -> list[str]:
        """Classes of the layers that multiply."""
        found = set()
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            kernel = getattr(getattr(method, "moe_kernel", None), "impl", None)
            found.add(type(getattr(method, "fp8_linear", None)).__name__)
            found.add(type(getattr(kernel, "fused_experts", None)).__name__)
        return sorted(found - {"NoneType"})

    def begin_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()

    def end_profile(self) -> dict:
        """Microseconds in which the GPU was busy, and launches and microseconds of each kernel, of which some overlap
        others."""
        import torch

        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        events = [e for e in self._profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels, busy, last = {}, 0.0, 0.0
        for begin, end, name in sorted((e.time_range.start, e.time_range.end, e.name) for e in events):
            launches, microseconds = kernels.get(name, (0, 0.0))
            kernels[name] = launches + 1, microseconds + end - begin
            busy, last = busy + max(0.0, end - max(begin, last)), max(end, last)
        return {"busy": busy, "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1][1]))}


class Served:
    """vLLM's engine of one model in this process; each method serves a request of the parent process."""

    def __init__(self, folder: str, kind: str, layers: int, in_blocks: bool) -> None:
        import models
        from vllm import LLM

        sizes = SIZES[kind] | {"num_hidden_layers": layers}
        Path(folder, "config.json").write_text(json.dumps(models.config(kind, sizes, in_blocks)))
        begin = time.perf_counter()
        self._engine = LLM(
            folder,
            load_format=models.LOADER,
            skip_tokenizer_init=True,
            max_model_len=MOST_TOKENS + 256,
            max_num_batched_tokens=MOST_TOKENS,
            max_num_seqs=256,
            gpu_memory_utilization=0.12,
            kv_cache_memory_bytes=15 * 10**8,
            enable_prefix_caching=False,
            enforce_eager=not in_blocks,
            worker_extension_cls="serve.Worker",
            compilation_config={"cudagraph_capture_sizes": [1, 32, 256]},
        )
        self._seconds = time.perf_counter() - begin
        self._drawn = 0

    def state(self) -> dict:
        return {"seconds to start": self._seconds, "classes": self._engine.collective_rpc("classes")[0]}

    def compilations(self) -> int:
        return self._engine.collective_rpc("compilations")[0]

    def say(self, prompts: int, length: int, tokens: int) -> dict:
        """Log-probabilities of prompts, the same in every engine, and the tokens that follow."""
        self._drawn = 0
        outputs = self._run(prompts, length, tokens, prompt_logprobs=0)
        logprobs = []
        for output in outputs:
            pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            logprobs += [found[token].logprob for token, found in pairs]
        return {"logprobs": logprobs, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def times(self, prompts: int, length: int, tokens: int, warm_ups: int, repeats: int) -> list[float]:
        """Seconds of fresh prompts."""
        found = []
        for _ in range(warm_ups + repeats):
            begin = time.perf_counter()
            self._run(prompts, length, tokens)
            found.append(time.perf_counter() - begin)
        return found[warm_ups:]

    def profile(self, prompts: int, length: int, tokens: int) -> dict:
        self._engine.collective_rpc("begin_profile")
        self._run(prompts, length, tokens)
        return self._engine.collective_rpc("end_profile")[0]

    def _run(self, prompts: int, length: int, tokens: int, **options) -> list:
        from vllm import SamplingParams

        given = []
        for _ in range(prompts):
            self._drawn += 1
            given.append({"prompt_token_ids": [(i * i + 7919 * i * self._drawn) % 150000 + 3 for i in range(length)]})
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        return self._engine.generate(given, sampling, use_tqdm=False)


def answer(kind: str, layers: int, role: str) -> None:
    """Serve the parent's requests, a line of JSON each, until they end."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the log, too, is vLLM's
    with tempfile.TemporaryDirectory() as folder:
        served = Served(folder, kind, layers, role != "bf16")
        print(json.dumps(served.state()), file=replies, flush=True)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(getattr(served, name)(*arguments)), file=replies, flush=True)


# ---- the parent


class Engine:
    """A process that serves; `ask` raises RuntimeError with the end of its log when it has ended."""

    def __init__(self, kind: str, layers: int, role: str, cache: Path, log: Path) -> None:
        self._log = log
        command = [sys.executable, __file__, "--engine", kind, str(layers), role]
        environment = {
            **os.environ,
            "VLLM_CACHE_ROOT": str(cache),
            "VLLM_USE_DEEP_TILE": str(int(role == "deep_tile")),
        }
        cache.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
            self._process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        self._state = None

    def wait(self) -> dict:
        """Wait until it serves. Returns the classes that multiply, and the time that it took."""
        self._state = self._state or self._reply()
        return self._state

    def ask(self, name: str, *arguments):
        self.wait()
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._log.name}: the engine has ended\n{self._log.read_text()[-6000:]}")
        return json.loads(line)

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Trial:
    """Two engines of one kind of model, with and without deep_tile, and a third in BF16."""

    def __init__(self, kind: str, layers: int | None) -> None:
        self.found = {"kind": kind, "layers": layers or SIZES[kind]["num_hidden_layers"]}
        self._failures = []
        self._engines = {}

    def start(self, folder: Path, at_once: bool, has_bf16: bool) -> None:
        kind, layers = self.found["kind"], self.found["layers"]
        for role in ("vllm", "deep_tile", *(["bf16"] if has_bf16 else [])):
            cache = folder / (f"{kind}-{role}" if at_once else kind)
            self._engines[role] = Engine(kind, layers, role, cache, folder / f"{kind}-{role}.log")
            if not at_once:
                self.wait()

    def wait(self) -> None:
        """Wait until all serve. `run` reports an engine that ends before."""
        for engine in self._engines.values():
            with contextlib.suppress(RuntimeError):
                engine.wait()

    def run(self, rounds: int) -> list[str]:
        """Run the trial and return its faults; `found` gets the measurements."""
        try:
            self._check()
            self._measure(rounds)
        except RuntimeError as error:
            self._failures.append(str(error))
        return [f"{self.found['kind']}: {failure}" for failure in self._failures]

    def _check(self) -> None:
        states = {role: engine.wait() for role, engine in self._engines.items()}
        said = {role: engine.ask("say", 2, 160, 16) for role, engine in self._engines.items()}
        if "bf16" in self._engines:
            self._engines.pop("bf16").end()
        self.found |= {"states": states} | _compared(said)
        if self.found.get("from BF16, deep_tile", 0) > MORE_DIFFERENCE * self.found.get("from BF16, vllm", 1):
            self._failures.append("log-probabilities are further from those in BF16 than with vLLM's kernels")
        if not all(name.startswith("DeepTile") for name in states["deep_tile"]["classes"]):
            self._failures.append(f"other classes than deep_tile's serve: {states['deep_tile']['classes']}")
        print(json.dumps(self.found, indent=1), flush=True)

    def _measure(self, rounds: int) -> None:
        theirs, ours = (self._engines[role] for role in ("vllm", "deep_tile"))
        compiled = ours.ask("compilations")
        for engine in (theirs, ours):
            engine.ask("times", 2, 16, 4, 0, 2)
        new = [ours.ask("times", 1, n, 1, 0, 2) for n in NEW_LENGTHS]
        self.found["longest stall of deep_tile at a new number of tokens, s"] = max(one - two for one, two in new)
        steps = [(f"decode of {n}", (n, 16, TOKENS + 1), (n, 16, 1), TOKENS) for n in DECODES]
        steps += [(f"prefill of {n}", (1, n, 1), None, 1) for n in PREFILLS]
        for what, long, short, count in steps if rounds else ():
            self.found[what] = self._timed(long, short, count, rounds)
            self._show(what)
        profiles = {r: {what: e.ask("profile", *run) for what, run in PROFILES.items()} for r, e in self._both()}
        self.found["profiles"] = profiles
        self.found["compilations"] = ours.ask("compilations") - compiled
        if self.found["compilations"]:
            self._failures.append(f"{self.found['compilations']} kernels were compiled while it served")
        for role, found in profiles.items():
            names = {name for profile in found.values() for name in profile["kernels"]}
            if {name.startswith(OURS) for name in names} != {role == "deep_tile", False}:
                self._failures.append(f"{role}: the profile has {sorted(names)}")

    def _show(self, what: str) -> None:
        theirs, ours = (self.found[what][role] for role in ("vllm", "deep_tile"))
        ratio = statistics.median(ours) / statistics.median(theirs)
        medians = f"{statistics.median(theirs):.3f} with vLLM's, {statistics.median(ours):.3f} with deep_tile"
        spread = f"{min(theirs):.3f} to {max(theirs):.3f}, {min(ours):.3f} to {max(ours):.3f}"
        print(f"  {what}, ms: {medians}, {ratio:.3f} ({spread})", flush=True)

    def end(self) -> None:
        for engine in self._engines.values():
            engine.end()

    def _both(self):
        return [(role, self._engines[role]) for role in ("vllm", "deep_tile")]

    def _timed(self, long: tuple, short: tuple | None, count: int, rounds: int) -> dict[str, list[float]]:
        """Milliseconds per step, by engine: of `count` steps the median in each round."""
        found = {"vllm": [], "deep_tile": []}
        for n in range(rounds):
            for role, engine in self._both()[:: 1 if n % 2 else -1]:
                seconds = statistics.median(engine.ask("times", *long, 1, REPEATS))
                if short:
                    seconds -= statistics.median(engine.ask("times", *short, 1, REPEATS))
                found[role].append(1e3 * seconds / count)
        return found


def _compared(said: dict) -> dict:
    """For each pair of engines, mean differences of log-probabilities and counts of equal tokens."""
    found = {}
    for one, other in (("vllm", "deep_tile"), ("bf16", "vllm"), ("bf16", "deep_tile")):
        if one not in said or other not in said:
            continue
        pairs = list(zip(said[one]["logprobs"], said[other]["logprobs"], strict=True))
        tokens = [zip(*rows, strict=True) for rows in zip(said[one]["tokens"], said[other]["tokens"], strict=True)]
        name = f"from BF16, {other}" if one == "bf16" else f"{one} and {other}"
        found[name] = statistics.fmean(abs(a - b) for a, b in pairs)
        found[f"{name}: equal tokens"] = statistics.fmean(a == b for row in tokens for a, b in row)
    found["spread of log-probabilities"] = statistics.pstdev(said["vllm"]["logprobs"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(SIZES)}; both by default")
    parser.add_argument("--layers", type=int, help="of the model, fewer to be done sooner")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of timing; default: {ROUNDS}")
    parser.add_argument("--at-once", action="store_true", help="start all engines together, with a cache for each")
    parser.add_argument("--folder", type=Path, help="for logs and compile caches; by default a temporary one")
    parser.add_argument("--no-bf16", action="store_true", help="compare the two engines with each other alone")
    parser.add_argument("--out", type=Path, help="a file for all that was found, as JSON")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        kind, layers, role = options.engine
        answer(kind, int(layers), role)
        return 0
    if not set(options.kinds) <= set(SIZES):
        parser.error(f"kinds are {', '.join(SIZES)}")
    with tempfile.TemporaryDirectory() as folder:
        failures = run(options, options.folder or Path(folder))
    print("\n".join(failures) or "all is as it should be")
    return int(bool(failures))


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    trials, failures = [], []
    try:
        for kind in options.kinds or SIZES:
            trials.append(Trial(kind, options.layers))
            trials[-1].start(folder, options.at_once, not options.no_bf16)
            if not options.at_once:
                failures += trials[-1].run(options.rounds)
                trials[-1].end()
        if options.at_once:
            for trial in trials:
                trial.wait()
            for trial in trials:
                failures += trial.run(options.rounds)
                trial.end()
    finally:
        for trial in trials:
            trial.end()
        if options.out:
            options.out.write_text(json.dumps([trial.found for trial in trials], indent=1))
    return failures


if __name__ == "__main__":
    sys.exit(main())
