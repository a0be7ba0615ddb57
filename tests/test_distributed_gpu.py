"""Layers over two processes with GPUs: ranks.py has what each rank checks.

python -m pytest tests/test_distributed_gpu.py
"""

import secrets

import pytest
import ranks
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", ranks.RANKS), ("gloo", 1)])
def test_ranks_agree_with_one_process(backend, gpus, tmp_path):
    """By NCCL on a GPU each, and by gloo where they share one, as NCCL refuses."""
    found = torch.cuda.device_count()
    if found < gpus:
        pytest.skip(f"needs {gpus} Hopper GPUs; torch sees {found}")
    seed = secrets.randbits(31)
    print(f"seed={seed}")
    failures = ranks.run(backend, "cuda", tmp_path, seed)
    assert not failures, failures
