"""Layers over two GPUs by NCCL: ranks.py has what each rank checks.

python -m pytest tests/test_distributed_gpu.py
"""

import secrets

import pytest
import ranks
import torch

pytestmark = pytest.mark.gpu


def test_ranks_agree_with_one_process(tmp_path):
    found = torch.cuda.device_count()
    if found < ranks.RANKS:
        pytest.skip(f"needs {ranks.RANKS} Hopper GPUs; torch sees {found}")
    seed = secrets.randbits(31)
    print(f"seed={seed}")
    failures = ranks.run("nccl", tmp_path, seed)
    assert not failures, failures
