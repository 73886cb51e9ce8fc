"""A server over a tiny engine, in this process. Without the extra `serve` (and a client for it) this folder is not collected."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.evaluate.tiny import engine, one_thread

collect_ignore_glob: list[str] = []
for _needed in ("fastapi", "uvicorn", "starlette.testclient"):
    try:
        importlib.import_module(_needed)
    except (ImportError, RuntimeError):     # starlette raises RuntimeError when no HTTP client is installed
        collect_ignore_glob = ["test_*.py"]

_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.fixture
def client() -> Iterator[Any]:
    """A client of a healthy server; `client.engine` is the engine behind it."""
    from starlette.testclient import TestClient

    from karui.inference.server.app import create_app

    served = engine()
    with TestClient(create_app(served, "tiny")) as found:
        found.engine = served
        yield found
