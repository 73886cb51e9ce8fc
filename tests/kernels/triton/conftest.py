"""The kernels' tests. Without a GPU they run in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from karui.kernels.triton_support import has_triton

collect_ignore_glob = [] if has_triton() else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
