"""vLLM on a Hopper GPU, with deep_tile and without, in turns: what it says, and how long it takes.

    python tests/engines/serve.py           # in an environment with vLLM and deep_tile, installed by pip

Each turn is a process that makes a model of random FP8 weights, the same ones, dense or of experts, and serves it with
vLLM's defaults: torch.compile and CUDA graphs. Log-probabilities of a prompt must agree as well as two roundings of one
input do, no kernel may be compiled while it serves, and medians of times are printed as ratios.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 16384,
    "moe_intermediate_size": 768,
    "num_attention_heads": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
WARM_UPS, REPEATS, TOKENS = 2, 5, 33
MOST_DIFFERENCE = 0.25
"""Of log-probabilities, in the mean: random layers amplify what quantisation rounds differently."""


def serve(kind: str) -> dict:
    """One turn, in this process."""
    import in_vllm
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import register_model_loader

    import deep_tile

    with tempfile.TemporaryDirectory() as folder:
        config = in_vllm.CONFIG | in_vllm.MODELS[kind] | SIZES
        gates = [f"model.layers.{layer}.mlp.gate" for layer in range(SIZES["num_hidden_layers"])]
        config["quantization_config"] = config["quantization_config"] | {"modules_to_not_convert": ["lm_head", *gates]}
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        register_model_loader("random_weights")(in_vllm.RandomWeights)
        engine = LLM(
            folder,
            load_format="random_weights",
            skip_tokenizer_init=True,
            max_model_len=10240,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.5,
            enable_prefix_caching=False,
        )

    def run(prompts: int, length: int, tokens: int, **options):
        given = [{"prompt_token_ids": [(7 * i + p) % 4000 + 3 for i in range(length)]} for p in range(prompts)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        return engine.generate(given, sampling, use_tqdm=False)

    def seconds(prompts: int, length: int, tokens: int) -> float:
        times = []
        for _ in range(WARM_UPS + REPEATS):
            begin = time.perf_counter()
            run(prompts, length, tokens)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[WARM_UPS:])

    said = run(1, 300, 1, prompt_logprobs=0)[0].prompt_logprobs
    found = {"logprobs": [next(iter(each.values())).logprob for each in said if each]}
    compiled = deep_tile.compilations()
    for prompts in (1, 32):
        first, all_ = seconds(prompts, 64, 1), seconds(prompts, 64, TOKENS)
        found[f"decode of {prompts}, ms"] = 1e3 * (all_ - first) / (TOKENS - 1)
    for length in (2048, 8191):
        found[f"prefill of {length}, ms"] = 1e3 * seconds(1, length, 1)
    found["compilations"] = deep_tile.compilations() - compiled
    return found


def turn(kind: str, variable: str) -> dict:
    """A process of its own, as an engine is started."""
    environment = {**os.environ, "VLLM_USE_DEEP_TILE": variable, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, __file__, kind], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not lines:
        raise SystemExit(f"{kind}, VLLM_USE_DEEP_TILE={variable}:\n{(done.stdout + done.stderr)[-6000:]}")
    return json.loads(lines[-1].removeprefix("FOUND "))


def main() -> int:
    fails = 0
    for kind in ("dense", "experts"):
        theirs, ours = (turn(kind, variable) for variable in ("0", "1"))
        logprobs = zip(theirs.pop("logprobs"), ours.pop("logprobs"), strict=True)
        difference = statistics.fmean(abs(one - other) for one, other in logprobs)
        compiled = ours.pop("compilations")
        print(f"{kind}: log-probabilities differ by {difference:.3f}, {compiled} kernels compiled while serving")
        for what, own in theirs.items():
            if what in ours:
                print(f"  {what}: {own:.2f} with vLLM's, {ours[what]:.2f} with deep_tile, {ours[what] / own:.2f}")
        fails += difference > MOST_DIFFERENCE or compiled > 0
    return int(fails > 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("FOUND", json.dumps(serve(sys.argv[1])))
    else:
        sys.exit(main())
