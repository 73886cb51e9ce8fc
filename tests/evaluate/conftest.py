"""One thread, as the machine is shared."""

import pytest

from tests.evaluate.tiny import one_thread

_one_thread = pytest.fixture(autouse=True)(one_thread)
