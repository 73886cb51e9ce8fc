"""Reference: ragged causal attention, output and gradients, against float64 autograd over one dense mask."""

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.kernels.document_attention import document_attention, reference

SHAPES = [((1,), 1, 1, 8), ((17, 1, 20), 2, 1, 24), ((16, 33), 1, 1, 16), ((0, 18, 3), 1, 1, 8)]  # lengths, heads, kv_heads, width
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, s) for s in SHAPES] + [(t, SHAPES[1]) for t in (torch.bfloat16, torch.float16)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("own", [{}, {"window": 1}, {"window": 19}, {"softcap": 2.0}, {"sinks": True}, {"window": 6, "softcap": 3.0, "sinks": True}], ids=str)
def test_values_and_gradients(shape, shared, own, dtype, device, rng):
    lengths, heads, kv_heads, width = shape
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("refused on a GPU")
    tokens = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(1, tokens, h, width, generator=rng, device=device).to(dtype).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    rest = {name: value for name, value in own.items() if name != "sinks"}
    if "sinks" in own:
        sinks = torch.randn(heads, generator=rng, device=device)
        mine.append(sinks.clone().requires_grad_())
        theirs.append(sinks.double().requires_grad_())
    out = document_attention(*mine[:3], cu, 0.3, shared=shared, sinks=dict(enumerate(mine)).get(3), **rest, backend="triton")
    want = reference.document_attention(*theirs[:3], cu, 0.3, shared=shared, sinks=dict(enumerate(theirs)).get(3), **rest).transpose(1, 2)
    assert out.shape == (1, tokens, heads, width)
    grad = torch.randn(out.shape, generator=rng, device=device).to(dtype)
    out.backward(grad)
    want.backward(grad.double())
    for a, b in [(out, want), *[(m.grad, t.grad) for m, t in zip(mine, theirs)]]:
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= BOUNDS[dtype] * max(1.0, float(b.abs().max()))


def test_tiles_cover_every_row_once(device):
    from karui.kernels.document_attention.triton import tiles

    cu = torch.tensor([0, 5, 5, 21, 22], device=device)  # one document is empty
    rows = [r for s, e, first in tiles(cu, 22, 8).tolist() for r in range(first, min(first + 8, e))]
    assert rows == list(range(22))


def test_rotation_on_the_way(device, rng):
    q, k, v = (torch.randn(1, h, 9, 8, generator=rng, device=device).bfloat16() for h in (4, 2, 2))
    angle = torch.rand(9, 4, generator=rng, device=device).repeat(1, 2)
    rotary, cu = (angle.cos(), angle.sin()), torch.tensor([0, 4, 9], device=device)
    got = document_attention(q, k, v, cu, 0.3, rotary=rotary, backend="triton")
    want = document_attention(q.float(), k.float(), v.float(), cu, 0.3, rotary=rotary, backend="torch")
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)


def test_refusals(device):
    q = torch.zeros(1, 1, 2, 512, device=device, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="head dimension of 512"):
        document_attention(q, q, q, torch.tensor([0, 2]), 1.0, backend="triton")
