"""Shared by all tests: one thread, no network, no tracker that asks for a login."""

import os

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _two_threads():
    """Torch's thread count is process-wide; a test that changes it must not slow the others."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
