"""Property: every grid survives layout, file and the independent decoder bit by bit; values agree with the kernels'."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import CorruptError
from karui.configs.manifest import TensorRecord
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle import decode, read, write
from karui.inference.bundle.layout import check_parts, expected_parts, from_parts, to_parts
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from tests.bundle.conftest import SPECS, random_q


def same(a, b):
    """Bit-equal QTensors."""
    assert a.spec == b.spec and tuple(a.shape) == tuple(b.shape)
    pairs = [(a.codes, b.codes), (a.scale, b.scale), (a.zero, b.zero)]
    pairs += [((a.extra or {})[k], (b.extra or {})[k]) for k in (a.extra or {}).keys() | (b.extra or {}).keys()]
    for x, y in pairs:
        if x is None or y is None:
            assert x is y
            continue
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))


@given(
    spec=st.sampled_from(SPECS), rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 10**6), zeros=st.booleans()
)
@settings(max_examples=150)
def test_parts_come_back(spec, rows, groups, seed, zeros):
    parsed = QuantSpec.parse(spec)
    width = groups * (parsed.group_size or 7)
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if zeros:
        w[0] = 0
    q = quantize(w, parsed)
    parts = to_parts(q)
    assert {n: (tuple(p.shape), p.dtype) for n, p in parts.items() if n in expected_parts(parsed, q.shape)} == expected_parts(
        parsed, q.shape
    )
    check_parts("w", parts, parsed, q.shape)
    same(from_parts(parts, parsed, q.shape), q)


@given(bits=st.integers(2, 8), width=st.integers(1, 40), data=st.data())
@settings(max_examples=100)
def test_any_codes_come_back_through_the_independent_unpacker(bits, width, data):
    """Also codes no quantizer would produce together, at widths that end inside a byte."""
    spec = QuantSpec(format="int", bits=bits, granularity="channel")
    low, high = spec.code_range
    values = data.draw(st.lists(st.integers(low, high), min_size=width, max_size=width))
    codes = torch.tensor([values], dtype=torch.int8)
    q = QTensor(codes, torch.ones(1, 1, dtype=torch.float16), None, spec, (1, width))
    stored = {"codes": decode.Stored("U8", to_parts(q)["codes"].numpy())}
    record = TensorRecord(spec=str(spec), shape=(1, width), dtype="float32", parts={"codes": "", "scale": ""})
    assert decode.codes(stored, record).tolist() == [values]


@pytest.mark.parametrize("spec", SPECS)
def test_through_the_file(tmp_path, spec):
    q = random_q(spec)
    manifest = write(tmp_path / "b", {"layer.weight": q, "norm": torch.arange(5.0)}, {"model_type": "llama"})
    bundle = read(tmp_path / "b", verify="full")
    same(bundle.weight("layer.weight"), q)
    assert torch.equal(bundle.weight("norm"), torch.arange(5.0))
    for name, parts in decode.read_stored(tmp_path / "b", manifest):
        if name == "layer.weight":
            np.testing.assert_allclose(decode.values(parts, manifest.tensors[name]), q.dequantize().numpy(), rtol=2e-7, atol=1e-9)
            if not q.spec.double_quant:
                assert np.array_equal(decode.values(parts, manifest.tensors[name]), q.dequantize().numpy())
    stored_bits = 8 * bundle.packed("layer.weight")["codes"].nbytes
    assert stored_bits == q.codes.numel() * {"ternary": 2, "binary": 1}.get(q.spec.format, q.spec.bits), "packed stays packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_kept_tensors_of_every_dtype(tmp_path, dtype):
    w = (torch.randn(4, 6) * 3).to(dtype)
    write(tmp_path / "b", {"w": w, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}, {})
    got = read(tmp_path / "b", verify="full").weights()
    assert got["w"].dtype == dtype and torch.equal(got["w"].float(), w.float())
    assert got["empty"].shape == (0, 3) and got["scalar"] == 2.0


def test_more_than_two_dimensions(tmp_path):
    q = quantize(torch.randn(3, 4, 32), QuantSpec.parse("w4g16a"))
    write(tmp_path / "b", {"w": q}, {})
    same(read(tmp_path / "b").weight("w"), q)


def test_float8_table_is_torch_s():
    byte = torch.arange(256, dtype=torch.uint8)
    ours = decode.Stored("F8_E4M3", byte.numpy()).values
    theirs = byte.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    bits = torch.randint(0, 2**16, (1000,), dtype=torch.int32).to(torch.int16)
    ours = decode.Stored("BF16", bits.numpy().view(np.uint16)).values
    assert np.array_equal(ours, bits.view(torch.bfloat16).float().numpy(), equal_nan=True)


@pytest.mark.parametrize("part", ["codes", "scale", "zero"])
def test_the_decoder_sees_a_single_flipped_bit(tmp_path, part):
    """What the read-back check is for: a writer that stored something else would be found out."""
    q = random_q("w3g32a")
    manifest = write(tmp_path / "b", {"w": q}, {})
    changed = {"codes": q.codes, "scale": q.scale, "zero": q.zero}
    flipped = changed[part].clone()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    with pytest.raises(CorruptError, match=r"w.*read back"):
        decode.compare(tmp_path / "b", manifest, {"w": QTensor(**(changed | {part: flipped}), spec=q.spec, shape=q.shape)})
    assert decode.compare(tmp_path / "b", manifest, {"w": q}) == {"tensors": 1, "codes": 6 * 64}
