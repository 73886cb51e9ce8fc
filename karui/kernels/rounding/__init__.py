"""The two inner loops of finding a grid: the best scale of every group, and GPTQ's columns within one block.

On a CPU the compiled kernels serve (`native/rounding.cpp`), elsewhere and without a compiler plain torch (`reference`). The two
sum in different orders, so a candidate that ties to the last bit may fall either way; on one machine results repeat bit by bit.
"""

from __future__ import annotations

import ctypes as C
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.rounding import reference

log = logging.getLogger(__name__)
Element = Literal["int", "e2m1", "e4m3"]
_ELEMENTS: tuple[Element, ...] = ("int", "e2m1", "e4m3")
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


def search_scale(
    x: torch.Tensor, h: torch.Tensor | None, start: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec, *,
    ratios: Sequence[float], signs: int = 1, refine: int = 2,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The scale of each group that makes sum_j h_j (x_j - q_j)^2 least, among ratio * start and least-squares fits from there.

    Args:
        x: [R, G, n] fp32; h: [1, G, n] non-negative importances, or None for ones.
        start: [R, G] in its storage dtype; zero: [R, G] uint8 for affine grids, which follows the shrunk lower end, or None.
        signs: 2 also tries negative scales; refine: rounds of least squares after the ratios.

    Returns scale and zero as they came in, shape and dtype.
    """
    lib = None if x.device.type != "cpu" or x.shape[0] * x.shape[1] == 1 else _library()
    if lib is None:
        return reference.search_scale(x, h, start, zero, spec, ratios, signs, refine)
    x, scale = x.contiguous(), start.float().contiguous().clone()
    shift = None if zero is None else zero.float().contiguous().clone()
    weight = None if h is None else h.float().expand(1, *x.shape[1:]).contiguous()
    tried = torch.tensor(list(ratios), dtype=torch.float32)
    lib.karui_search_scale(
        x.data_ptr(), _pointer(weight), scale.data_ptr(), _pointer(shift), *x.shape, *spec.code_range, tried.data_ptr(),
        len(tried), signs, refine, _TYPES[spec.scale_dtype], torch.get_num_threads(),
    )  # fmt: skip
    return scale.to(start.dtype), None if shift is None else shift.to(torch.uint8)


def round_columns(
    work: torch.Tensor, rest: torch.Tensor, step: torch.Tensor, zero: torch.Tensor | None, low: int, high: int,
    element: Element = "int",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """GPTQ within one block of columns: q_j = round(w_j), e_j = w_j - q_j, w_k -= rest_jk e_j for k > j.

    Args:
        work: [columns, rows] fp32, one column of the weight per row; left as it is.
        rest: [columns, columns] fp32, upper triangle U_jk / U_jj.
        step, zero: [columns, rows] fp32, the grid at each weight; zero None for symmetric grids.
        element: what w / step is rounded to: whole numbers low..high, or the values of a small float (low, high unused).

    Returns codes (elements) and errors [columns, rows] fp32.
    """
    lib = None if work.device.type != "cpu" else _library()
    if lib is None:
        return reference.round_columns(work, rest, step, zero, low, high, element)
    work, step, turned = work.contiguous(), step.contiguous(), rest.T.contiguous()
    shift = None if zero is None else zero.contiguous()
    codes, err = torch.empty_like(work), torch.empty_like(work)
    lib.karui_round_columns(
        work.data_ptr(), turned.data_ptr(), step.data_ptr(), _pointer(shift), work.shape[1], work.shape[0], low, high,
        codes.data_ptr(), err.data_ptr(), _ELEMENTS.index(element), torch.get_num_threads(),
    )  # fmt: skip
    return codes, err


def _pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


@cache
def _library() -> Any:
    """The compiled loops, or None where they cannot be built; the reason is logged once."""
    from karui.kernels.native.build import build, chosen_isa

    try:
        lib = C.CDLL(str(build(chosen_isa(), ("rounding.cpp",))))
    except (KaruiError, OSError) as error:
        log.warning("native rounding kernels are not available, plain torch serves: %s", error)
        return None
    p, i, n = C.c_void_p, C.c_int, C.c_int64
    lib.karui_search_scale.argtypes = [p, p, p, p, n, i, i, i, i, p, i, i, i, i, i]
    lib.karui_round_columns.argtypes = [p, p, p, p, n, i, i, i, p, p, i, i]
    lib.karui_search_scale.restype = lib.karui_round_columns.restype = None
    return lib
