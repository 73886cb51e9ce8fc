"""`QuantSpec`: the one language for a quantization grid, with a short spelling that parses and prints back.

    w4g32      int4, symmetric, groups of 32 along the input dimension       w8        int8 per output channel
    w4g128a    int4, affine (a zero point per group)                         w8t       int8 per tensor
    w8a8       int8 weights per channel, int8 activations per token          w4g32a8   int4 weights, int8 activations
    w1.58      ternary per tensor (BitNet b1.58), w1.58g64 per group         w1        binary (BitNet)
    nf4        NormalFloat-4 in blocks of 64; nf4dq: scales quantized too    fp8       E4M3 per output channel
    mxfp8, mxfp4, nvfp4                                                      none      stays in high precision
    any of them with :fp32 or :bf16  scale dtype other than the default fp16, e.g. w4g64:fp32

Sources: group-wise int as in GPTQ (arXiv 2210.17323), NF4 in QLoRA (2305.14314), ternary in BitNet b1.58 (2402.17764),
MX in the OCP Microscaling specification v1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from karui.configs.errors import KaruiError, nearest

Format = Literal["int", "ternary", "binary", "nf4", "fp8", "mxfp8", "mxfp4", "nvfp4", "none"]
Granularity = Literal["tensor", "channel", "group", "token"]
ScaleDtype = Literal["float16", "bfloat16", "float32", "e8m0", "e4m3"]

_SUFFIX: dict[str, ScaleDtype] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_WEIGHT = re.compile(r"w(?P<bits>1\.58|[1-8])(?:g(?P<group>\d+)|(?P<tensor>t))?(?P<affine>a(?!\d))?(?:a(?P<act>8|16))?")
_NAMED: dict[str, dict[str, Any]] = {
    "none": dict(format="none", bits=16, granularity="tensor"),
    "nf4": dict(format="nf4", bits=4, granularity="group", group_size=64, scale_dtype="float32"),
    "nf4dq": dict(format="nf4", bits=4, granularity="group", group_size=64, scale_dtype="float32", double_quant=True),
    "fp8": dict(format="fp8", bits=8, granularity="channel", scale_dtype="float32"),
    "fp8t": dict(format="fp8", bits=8, granularity="tensor", scale_dtype="float32"),
    "mxfp8": dict(format="mxfp8", bits=8, granularity="group", group_size=32, scale_dtype="e8m0"),
    "mxfp4": dict(format="mxfp4", bits=4, granularity="group", group_size=32, scale_dtype="e8m0"),
    "nvfp4": dict(format="nvfp4", bits=4, granularity="group", group_size=16, scale_dtype="e4m3"),
}
_CHOICES = {"format": get_args(Format), "granularity": get_args(Granularity), "scale_dtype": get_args(ScaleDtype),
            "symmetric": (True, False), "double_quant": (True, False), "activation_bits": (8, 16)}
_EXAMPLES = ("w4g32", "w4g128a", "w3g64", "w2g64", "w8", "w8t", "w8a8", "w4g32a8", "w1.58", "w1", *_NAMED)


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """A frozen description of one grid. Two specs are the same grid exactly when they compare equal.

    Pydantic, in a recipe's sections, takes a spelling or a mapping for one; nothing else here needs it.

    Attributes:
        format: element type. `none` leaves the tensor in high precision.
        bits: bits per stored code (ternary stores 2).
        granularity: what shares a scale: the whole tensor, an output row, a group of `group_size` inputs, a token.
        group_size: values per scale, along the last dimension; only with granularity `group`.
        symmetric: codes centred on zero, no zero point stored.
        scale_dtype: the dtype scales are stored in; they are rounded to it before codes are computed.
        double_quant: NF4 only: absmax minus its mean is stored in 8 bit, blocks of 256 (QLoRA, section 3).
        activation_bits: 8: activations are quantized per token, symmetric, at run time; 16: they are not.

    Raises:
        KaruiError: a value that is not valid, or two that exclude one another.
    """

    format: Format = "int"
    bits: int = 4
    granularity: Granularity = "group"
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: ScaleDtype = "float16"
    double_quant: bool = False
    activation_bits: Literal[8, 16] = 16

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if (value := getattr(self, name)) not in valid:
                raise KaruiError(f"{name} is one of {', '.join(map(str, valid))}, got {value!r}")
        for name, value in (("bits", self.bits), ("group_size", 2 if self.group_size is None else self.group_size)):
            if type(value) is not int:
                raise KaruiError(f"{name} is a whole number, got {value!r}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise KaruiError("group_size goes with granularity 'group', and only with it")
        if self.group_size is not None and self.group_size < 2:
            raise KaruiError(f"group_size must be at least 2, got {self.group_size}")
        if self.format == "int" and self.bits not in (2, 3, 4, 5, 6, 7, 8):
            raise KaruiError(f"int grids have 2 to 8 bits, got {self.bits}")
        if not self.symmetric and self.format != "int":
            raise KaruiError(f"only int grids can be affine, not {self.format}")
        if self.double_quant and self.format != "nf4":
            raise KaruiError("double_quant belongs to nf4")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema as core

        types = get_type_hints(cls)
        keys = {f.name: core.typed_dict_field(handler.generate_schema(types[f.name]), required=False) for f in fields(cls)}

        def read(given: Any, checked: Any) -> QuantSpec:
            if not isinstance(given, str | Mapping | QuantSpec):
                raise KaruiError(f"a grid is a spelling, such as {_EXAMPLES[0]}, or a mapping with the keys {', '.join(keys)}")
            return given if isinstance(given, QuantSpec) else cls(**checked(_fields(given) if isinstance(given, str) else given))

        return core.no_info_wrap_validator_function(read, core.typed_dict_schema(keys, extra_behavior="forbid"),
                                                    serialization=core.plain_serializer_function_ser_schema(asdict))  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """The spec a short spelling stands for. Raises `KaruiError` naming the valid spellings."""
        values = _fields(text)
        try:
            return cls(**values)
        except KaruiError as error:
            raise KaruiError(f"quantization spec {text!r}: {error}.") from error

    def __str__(self) -> str:
        base, suffix = self._stem(), ""
        default = _NAMED.get(base, {}).get("scale_dtype", "float16")
        if self.scale_dtype != default:
            suffix = ":" + next(k for k, v in _SUFFIX.items() if v == self.scale_dtype)
        return base + suffix

    def _stem(self) -> str:
        if self.format not in ("int", "ternary", "binary"):
            return {"nf4": "nf4dq" if self.double_quant else "nf4", "fp8": "fp8t" if self.granularity == "tensor" else "fp8"}.get(
                self.format, self.format
            )
        bits = {"ternary": "1.58", "binary": "1"}.get(self.format, str(self.bits))
        shared = (
            f"g{self.group_size}" if self.group_size else "t" if self.granularity == "tensor" and self.format == "int" else ""
        )
        return f"w{bits}{shared}{'' if self.symmetric else 'a'}{'a8' if self.activation_bits == 8 else ''}"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight: codes plus this grid's share of scales and zero points (per-row scales not counted)."""
        bits = float({"ternary": 2, "none": 16}.get(self.format, self.bits))
        if self.group_size is None:
            return bits
        scale = {"float16": 16, "bfloat16": 16, "float32": 32, "e8m0": 8, "e4m3": 8}[self.scale_dtype]
        if self.double_quant:
            return bits + 8 / self.group_size + 32 / (self.group_size * 256)
        return bits + (scale + (0 if self.symmetric else 8)) / self.group_size

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code: affine 0..2^b-1, symmetric -2^(b-1)..2^(b-1)-1, 8 bit symmetric +-127."""
        if self.format == "int":
            if not self.symmetric:
                return 0, 2**self.bits - 1
            return (-127, 127) if self.bits == 8 else (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        return {"ternary": (-1, 1), "binary": (-1, 1), "nf4": (0, 15), "mxfp4": (0, 15), "nvfp4": (0, 15)}.get(
            self.format, (0, 255)
        )


def _fields(text: str) -> dict[str, Any]:
    stem, _, suffix = text.strip().partition(":")
    if suffix and suffix not in _SUFFIX:
        raise KaruiError(f"quantization spec {text!r}: unknown scale dtype {suffix!r}; use one of {', '.join(_SUFFIX)}.")
    extra: dict[str, Any] = {"scale_dtype": _SUFFIX[suffix]} if suffix else {}
    if stem in _NAMED:
        if suffix and _NAMED[stem].get("scale_dtype") in ("e8m0", "e4m3"):
            raise KaruiError(f"quantization spec {text!r}: {stem} fixes its own scale dtype; write {stem!r}.")
        return {**_NAMED[stem], **extra}
    match = _WEIGHT.fullmatch(stem)
    if match is None:
        raise KaruiError(f"quantization spec {text!r} is not known; examples: {', '.join(_EXAMPLES)}.{nearest(stem, _EXAMPLES)}")
    bits, group = match["bits"], match["group"]
    found: dict[str, Any] = {"activation_bits": int(match["act"] or 16), **extra}
    if bits in ("1", "1.58"):
        found |= dict(format="binary" if bits == "1" else "ternary", bits=1 if bits == "1" else 2, granularity="tensor")
    else:
        found |= dict(format="int", bits=int(bits), granularity="channel")
    if group:
        found |= dict(granularity="group", group_size=int(group))
    elif match["tensor"]:
        found |= dict(granularity="tensor")
    return found | (dict(symmetric=False) if match["affine"] else {})
