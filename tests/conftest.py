"""Shared by all tests: one thread, no network, no tracker that asks for a login."""

import os

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Elsewhere property tests look for new examples; CI repeats the same ones, so that a red run means a changed project.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _two_threads():
    """Torch's thread count is process-wide; a test that changes it must not slow the others."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
