"""A model of torch.nn.Linear layers in FP8, beside the same in BF16: how far apart, and how long each takes.

    python examples/linear.py

Runs on a Hopper GPU, or on the CPU, where deep_tile multiplies by the definition: to see that it works, not how fast.
"""

import copy
import time

import torch

import deep_tile


def timed_ms(model: torch.nn.Module, x: torch.Tensor, calls: int = 5) -> float:
    model(x)  # the first call prepares launches
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        model(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e3


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if deep_tile.is_available()[0] else "cpu"
    hidden, tokens = (4096, 2048) if device == "cuda" else (256, 32)
    layers = [torch.nn.Linear(hidden, 4 * hidden), torch.nn.SiLU(), torch.nn.Linear(4 * hidden, hidden)]
    bf16 = torch.nn.Sequential(*layers).to(device, torch.bfloat16).eval()
    fp8 = copy.deepcopy(bf16)

    print(f"{deep_tile.nn.replace_linears(fp8)} layers replaced on {device}")
    if device == "cuda":
        deep_tile.precompile_model(fp8, max_tokens=tokens)
        deep_tile.forbid_compilation()

    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    exact, y = bf16(x).float(), fp8(x).float()
    print(f"relative difference from BF16: {float((y - exact).norm() / exact.norm()):.3f}")
    print(f"BF16 {timed_ms(bf16, x):.2f} ms, FP8 {timed_ms(fp8, x):.2f} ms")


if __name__ == "__main__":
    main()
