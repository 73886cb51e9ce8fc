"""Unit and property tests of the spec: its short spelling, its checks, and what a recipe's sections take for one."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from karui.configs import KaruiError, QuantSpec
from karui.configs.recipe import ExportSection

SPELLINGS = ["w4g32", "w4g128a", "w8a8", "w8t", "w8ta", "w1.58", "w1.58g64", "w1", "nf4", "nf4dq", "fp8", "fp8t", "mxfp8", "mxfp4",
             "nvfp4", "none", "w4g64:fp32", "w4g64:bf16", "w4g32a8", "w4g128aa8", "w3", "w2g64a"]  # fmt: skip


@pytest.mark.parametrize("text", SPELLINGS)
def test_spelling_parses_and_prints_back(text):
    spec = QuantSpec.parse(text)
    assert str(spec) == text
    assert QuantSpec.parse(str(spec)) == spec


@given(
    st.integers(2, 8),
    st.sampled_from([None, 16, 32, 64, 128]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", ":fp32", ":bf16"]),
)
def test_every_integer_grid_has_one_spelling(bits, group, affine, act, suffix):
    text = f"w{bits}{f'g{group}' if group else ''}{'a' if affine else ''}{'a8' if act else ''}{suffix}"
    spec = QuantSpec.parse(text)
    assert str(spec) == text
    assert (spec.bits, spec.group_size, spec.symmetric, spec.activation_bits) == (bits, group, not affine, 8 if act else 16)


def test_meaning_of_w4g128a():
    spec = QuantSpec.parse("w4g128a")
    assert (spec.format, spec.bits, spec.granularity, spec.group_size, spec.symmetric) == ("int", 4, "group", 128, False)
    assert (
        spec.code_range == (0, 15)
        and QuantSpec.parse("w4g32").code_range == (-8, 7)
        and QuantSpec.parse("w8").code_range == (-127, 127)
    )


def test_bits_per_weight():
    assert QuantSpec.parse("w4g32").bits_per_weight == 4.5
    assert QuantSpec.parse("nf4").bits_per_weight == 4.5
    assert QuantSpec.parse("nf4dq").bits_per_weight == pytest.approx(4.127, abs=1e-3)  # QLoRA, section 3


@pytest.mark.parametrize("text, message", [
    ("w4q32", "Did you mean 'w4g32'"), ("w9", "not known"), ("", "not known"), ("w4g1", "at least 2"), ("w4g32:fp64", "unknown scale dtype 'fp64'"),
    ("nvfp4:fp32", "fixes its own scale dtype"), ("w1.58a", "only int grids can be affine"), ("nf5", "Did you mean 'nf4'")])  # fmt: skip
def test_bad_spelling_says_what_to_do(text, message):
    with pytest.raises(KaruiError, match=message):
        QuantSpec.parse(text)


@pytest.mark.parametrize("fields, message", [
    ({"format": "int4"}, "format is one of int, ternary, .*, got 'int4'"), ({"granularity": "row"}, "granularity is one of tensor, channel"),
    ({"scale_dtype": None}, "scale_dtype is one of float16"), ({"symmetric": "no"}, "symmetric is one of True, False, got 'no'"),
    ({"activation_bits": 4}, "activation_bits is one of 8, 16, got 4"), ({"bits": "4"}, "bits is a whole number, got '4'"),
    ({"bits": True}, "bits is a whole number, got True"), ({"group_size": 32.0}, "group_size is a whole number, got 32.0"),
    ({"group_size": None}, "group_size goes with granularity 'group'"), ({"granularity": "channel"}, "group_size goes with granularity 'group'"),
    ({"bits": 9}, "int grids have 2 to 8 bits, got 9"), ({"double_quant": True}, "double_quant belongs to nf4")])  # fmt: skip
def test_bad_values_are_refused(fields, message):
    with pytest.raises(KaruiError, match=message):
        QuantSpec(**{"group_size": 32} | fields)


def test_a_value_like_any_other():
    spec = QuantSpec.parse("w4g32")
    with pytest.raises(FrozenInstanceError):
        spec.bits = 8
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec and len({spec, QuantSpec(group_size=32), QuantSpec.parse("w8")}) == 2
    assert repr(QuantSpec.parse("w8")).startswith("QuantSpec(format='int', bits=8, granularity='channel', group_size=None, symmetric=True, ")


def test_what_a_section_takes_for_one():
    spec = QuantSpec.parse("w3g64")
    section = ExportSection(spec="w3g64", embedding={"bits": 3, "group_size": 64})
    assert section.spec == section.embedding == ExportSection(spec=spec).spec == spec
    assert section.model_dump()["spec"] == section.model_dump(mode="json")["embedding"] == asdict(spec)
    assert ExportSection.model_validate_json(section.model_dump_json()) == section
