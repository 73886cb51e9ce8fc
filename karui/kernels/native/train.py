"""Native forms of what training on a CPU does: matrix products, attention, RMSNorm and SwiGLU, forward and backward.

`usable(*tensors)` says whether they can serve these tensors (fp32, CPU, no other thread runtime than the OpenMP that torch
itself runs on); the callers in `karui.kernels.*` keep a torch form for everything else. Results do not depend on the number of
threads.
"""

from __future__ import annotations

import ctypes as C
import logging
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from karui.configs.errors import KaruiError
from karui.kernels.native.build import build, chosen_isa

log = logging.getLogger(__name__)
SOURCES = ("train.cpp", "sgemm.h", "tiles.h", "parallel.h", "simd.h", "neon.h")
SMALLEST = 1 << 13  # values of b below which a product is left to torch
Operands = Literal["fp32", "bf16", "bf16x3"]
LANES = {"avx512": 16, "avx2": 8, "neon": 8, "generic": 8}


class _Matrix(C.Structure):
    """`sgemm::Matrix`."""

    _fields_: ClassVar[Any] = [("data", C.c_void_p), ("row", C.c_int64), ("column", C.c_int64)]


class _Attention(C.Structure):
    """`Attention` of train.cpp."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_void_p) for n in ("q", "k", "v", "cosine", "sine", "out", "lse", "dout", "dq", "dk", "dv", "prefix", "start")),
        *((n, C.c_int64) for n in ("q_row", "k_row", "v_row", "dout_row")),
        *((n, C.c_int32) for n in ("documents", "shared", "heads", "kv_heads", "d", "threads")),
        ("scaling", C.c_float),
        ("gomp", C.c_void_p),
    ]


class Library:
    """The compiled training kernels, and torch's own way into its threads."""

    def __init__(self, isa: str, gomp: int) -> None:
        self.lanes, self.gomp = LANES[isa], gomp
        lib = C.CDLL(str(build(isa, SOURCES)))
        p, i, f, n = C.c_void_p, C.c_int, C.c_float, C.c_int64
        for name, arguments in (
            ("attention", [p]), ("attention_backward", [p]), ("rms_norm", [p, p, p, p, i, i, f, i, p]),
            ("rms_norm_backward", [p, p, p, p, p, i, i, i, p]), ("swiglu", [p, p, p, n, i, p]),
            ("swiglu_backward", [p, p, p, p, p, p, n, i, p]), ("sgemm", [p, p, p, i, i, i, n, i, i, i, p]),
            ("low_rank", [p, p, p, p, i, i, i, i, f, p, p, i, i, p]),
        ):
            function = getattr(lib, f"karui_{name}")
            function.restype, function.argtypes = None, arguments
            setattr(self, name, function)
        self.best_bf16: int = lib.karui_best_bf16()  # 0: no faster than fp32; 1: AVX512-BF16; 2: AMX
        assert lib.karui_train_sizes() == C.sizeof(_Attention), "Attention differs between C++ and Python"

    def way(self, operands: Operands) -> int:
        """The number by which train.cpp knows a product of such operands: the fastest here."""
        return {"fp32": 0, "bf16": max(1, self.best_bf16), "bf16x3": 3 if self.best_bf16 == 2 else 0}[operands]

    def __getattr__(self, name: str) -> Any:  # only for type checkers: functions are set in __init__
        raise AttributeError(name)


@cache
def _library() -> Library | None:
    gomp = _torch_threads()
    if gomp is None:
        log.info("torch does not run on GNU OpenMP here; training uses torch's own operations")
        return None
    try:
        return Library(chosen_isa(), gomp)
    except (KaruiError, OSError) as error:
        log.warning("native training kernels are not available, torch's operations serve: %s", error)
        return None


def _torch_threads() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    files = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    own = [f for f in files if "torch" in f] or sorted(files)
    return C.cast(C.CDLL(own[0]).GOMP_parallel, C.c_void_p).value if own else None


def ready() -> bool:
    """Whether the native kernels run here at all."""
    return _library() is not None


def has_bf16() -> bool:
    """Whether products in bf16 are faster than in fp32: AVX512-BF16 or AMX, and kernels compiled for it."""
    return (library := _library()) is not None and library.best_bf16 > 0


def usable(*tensors: torch.Tensor) -> bool:
    """Whether the native kernels can take these tensors: fp32 on the CPU, rows a multiple of the vector width."""
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return False
    library = _library()
    return library is not None and all(t.shape[-1] % library.lanes == 0 for t in tensors)


def product_usable(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `product` takes a [m, k] and b [k, n], and would not be slower than torch: fp32 on the CPU, b not too narrow.

    The number of rows has no say: rows of two sizes of micro-batch must be computed the same.
    """
    k, n = b.shape
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and 1 in t.stride() for t in (a, b))
    return plain and len(a) > 0 and k >= 16 and n >= 32 and k * n >= SMALLEST and _library() is not None


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, plus: bool, operands: Operands = "fp32") -> None:
    """out (+)= a b; the rows of out are dense. Each value is the same however many rows or threads there are.

    bf16: a and b are rounded to it (to nearest even) and their products summed in fp32. bf16x3: with AMX, what rounding dropped
    is rounded to bf16 too, and multiplied with the other operand (an infinite value then gives NaN); fp32 elsewhere.
    """
    library = _loaded()
    library.sgemm(_matrix(a), _matrix(b), out.data_ptr(), *out.shape, a.shape[1], out.stride(0), int(plus),
                  library.way(operands), _threads(), library.gomp)


def low_rank(
    x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scaling: float, operands: Operands = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x w + low v [m, n], low = scaling x u [m, r]) of x [m, k], w [k, n], u [k, r], v [r, n]; any strides.

    x, w and u are rounded as `operands` says; low v is computed and added in fp32.
    """
    library = _loaded()
    out, low = x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0], u.shape[1])
    library.low_rank(_matrix(x), _matrix(w), _matrix(u), _matrix(v), *out.shape, x.shape[1], u.shape[1], scaling, low.data_ptr(),
                     out.data_ptr(), library.way(operands), _threads(), library.gomp)
    return out, low


def _matrix(t: torch.Tensor) -> Any:
    return C.byref(_Matrix(t.data_ptr(), *t.stride()))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight x rstd, rstd [rows]); x contiguous."""
    library, out = _loaded(), torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty(rows)
    library.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rstd.data_ptr(), rows, x.shape[-1], eps, _threads(),
                     library.gomp)
    return out, rstd


def rms_norm_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """The gradient of x; dy and x contiguous."""
    library, dx = _loaded(), torch.empty_like(x)
    library.rms_norm_backward(dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr(), dx.data_ptr(), rstd.numel(),
                              x.shape[-1], _threads(), library.gomp)
    return dx


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) up; both contiguous."""
    library, out = _loaded(), torch.empty_like(gate)
    library.swiglu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), _threads(), library.gomp)
    return out


def swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dgate, dup, and with `again` the product itself); all contiguous."""
    library, dgate, dup = _loaded(), torch.empty_like(gate), torch.empty_like(up)
    out = torch.empty_like(gate) if again else None
    library.swiglu_backward(dy.data_ptr(), gate.data_ptr(), up.data_ptr(), dgate.data_ptr(), dup.data_ptr(),
                            None if out is None else out.data_ptr(), gate.numel(), _threads(), library.gomp)
    return dgate, dup, out


def attention_usable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> bool:
    """Whether `attention` takes q, k, v [1, heads, T, D] (bf16 as fp32) laid out token by token, and has work for each thread."""
    plain = all(t.dtype in (torch.float32, torch.bfloat16) and t.device.type == "cpu" for t in (q, k, v))
    library = _library() if plain else None
    if library is None or q.shape[0] != 1 or q.shape[-1] % (2 * library.lanes) or k.shape[-1] != v.shape[-1]:
        return False
    dense = all(t.stride(3) == 1 and t.stride(1) == t.shape[3] for t in (q, k, v))
    return dense and (len(bounds) - 1) * k.shape[1] >= _threads()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scaling: float, shared: bool,
    cosine: torch.Tensor | None, sine: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [1, T, heads, D], log-sum-exp [heads, T]); cosine and sine [T, D] rotate q and k first, halves against halves."""
    out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3])
    lse = q.new_empty(q.shape[1], q.shape[2])
    call, keep = _call(q, k, v, bounds, scaling, shared, cosine, sine, out, lse)
    _loaded().attention(C.byref(call))
    del keep
    return out, lse


def attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bounds: list[int], scaling: float, shared: bool, cosine: torch.Tensor | None, sine: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, each [1, T, heads, D] contiguous; dout is [1, T, heads, D] with contiguous rows."""
    call, keep = _call(q, k, v, bounds, scaling, shared, cosine, sine, out, lse)
    dq, dk, dv = (t.new_empty(1, t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v))
    prefix = q.new_empty(2 * call.documents * k.shape[1] * bounds[1] * q.shape[3] if shared else 0)
    call.dout, call.dout_row = dout.data_ptr(), dout.stride(1)
    call.dq, call.dk, call.dv, call.prefix = dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), prefix.data_ptr()
    _loaded().attention_backward(C.byref(call))
    del keep
    return dq, dk, dv


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scaling: float, shared: bool,
    cosine: torch.Tensor | None, sine: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
) -> tuple[_Attention, torch.Tensor]:
    start = torch.tensor(bounds, dtype=torch.int32)
    return _Attention(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), cosine=None if cosine is None else cosine.data_ptr(),
        sine=None if sine is None else sine.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(), start=start.data_ptr(),
        q_row=q.stride(2), k_row=k.stride(2), v_row=v.stride(2), documents=len(bounds) - 1, shared=int(shared),
        heads=q.shape[1], kv_heads=k.shape[1], d=q.shape[3], threads=_threads(), scaling=scaling, gomp=_loaded().gomp,
    ), start


def _loaded() -> Library:
    library = _library()
    assert library is not None, "ask usable() first"
    return library


def _threads() -> int:
    return torch.get_num_threads()
