"""Unit: cores are counted where the system does not say which of them this process may use (macOS)."""

import os

from karui.inference.models.native import default_threads
from karui.kernels.cores import usable_cores


def test_cores_without_an_affinity(monkeypatch):
    own = usable_cores()
    assert 1 <= own <= (os.cpu_count() or own)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count() and default_threads() >= 1
