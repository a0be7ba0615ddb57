"""The products that `demo` multiplies; the benchmarks measure these layers too, at more m."""

DEEPSEEK_V3_LAYERS = {
    "q and kv down-projection": (2112, 7168),
    "shared expert, gate and up": (4096, 7168),
    "shared expert, down": (7168, 2048),
    "attention output": (7168, 16384),
    "q up-projection": (24576, 1536),
    "kv up-projection": (32768, 512),
}
"""(n, k) for DeepSeek-V3's linear layers, used by `demo` and benchmarks."""

TOKENS = (16, 128, 4096)
"""m values: decoding, a larger batch, prefill."""
