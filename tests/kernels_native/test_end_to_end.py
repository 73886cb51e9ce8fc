"""Reference: the native runner against transformers on tiny random models of every architecture, in fp32."""

from __future__ import annotations

import pytest
import torch

from karui.inference.models.native import NativeRunner
from karui.kernels.native import available, isas
from tests.inference.conftest import tiny
from tests.inference.test_decoder import CASES, batch_of

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, isa):
    model, config, weights = tiny(CASES[case][0], **CASES[case][1])
    runner = NativeRunner(config, weights, threads=2, activation_bits=16, isa=isa)
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (1, 100)).tolist()[0]
    blocks = torch.randperm(39)[:25].add(1).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = [runner.forward(batch_of((ids[a:b], a, blocks))).logits for a, b in ((0, 17), (17, 18), (18, 41), (41, 100))]
    assert (torch.cat(got) - want).abs().max() < 1e-4
