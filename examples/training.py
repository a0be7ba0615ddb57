"""Training in FP8: a few steps of a small model, then a LoRA adapter on frozen FP8 weights.

    python examples/training.py

Runs on a Hopper GPU or on the CPU.
"""

import torch

import deep_tile


class LoRA(torch.nn.Module):
    """A frozen FP8 layer and a trained correction of low rank: `layer(x) + up(down(x))`."""

    def __init__(self, layer: deep_tile.nn.Linear, rank: int = 8):
        super().__init__()
        device, dtype = layer.weight.device, torch.bfloat16
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False, device=device, dtype=dtype)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def train(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = (model(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 10) -> None:
    torch.manual_seed(0)
    device = "cuda" if deep_tile.is_available()[0] else "cpu"
    x, target = (torch.randn(64, 256, device=device, dtype=torch.bfloat16) for _ in range(2))

    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    # All layers, since these are too small for `convert` to choose them by itself.
    deep_tile.train.convert(model, wanted=lambda name, layer: True)
    losses = train(model, x, target, steps)
    print(f"FP8 training on {device}: loss {losses[0]:.3f} to {losses[-1]:.3f}")

    adapted = LoRA(deep_tile.nn.Linear.from_float(torch.nn.Linear(256, 256, device=device, dtype=torch.bfloat16)))
    losses = train(adapted, x, target, steps)
    print(f"LoRA on FP8 weights: loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
