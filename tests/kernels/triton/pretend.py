"""A GPU that is not there: tensors that lie on the CPU and say "cuda", so that what is chosen by device runs as it would there.

Under `PretendGpu` a tensor moved to or made on "cuda" is marked, results of marked tensors are marked, and an operation on marked and
unmarked ones fails as it would on a real GPU (single numbers excepted). Autograd makes gradients out of sight and switches modes off, so
a custom function's backward pass gets a mode of its own (`backward_too`), in which every tensor counts as marked. Kernels run in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.cuda}
# what may name tensors of both sides, or only looks at one
_FREE = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__repr__}


_backward = [False]


def marked(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and (_backward[0] or getattr(t, "on_gpu", False))


def _mark(out: Any, on: bool) -> Any:
    for t in tree_leaves(out):
        if isinstance(t, torch.Tensor):
            t.on_gpu = on
    return out


class PretendGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            on = any(marked(t) for t in tensors)
            # these are made anew at every look, so they are equal and not the same
            if func == _DEVICE:
                return CUDA if on else func(*args)
            if func == _IS_CUDA:
                return on
            if func in (torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type):
                return func(*args, **kwargs)
            if func == _SET_DATA:
                func(*args)
                return _mark(args[0], marked(args[1]))
            if func is torch.Tensor.numpy and on:
                raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
            target = self._target(func, args, kwargs)
            if func is torch.Tensor.cpu:
                target = False
            args, kwargs = tree_map(self._here, (args, kwargs))
            if func not in _MOVES | _FREE and len({marked(t) for t in tensors if t.dim() > 0}) > 1:
                raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors on cuda:0 and on cpu")
            out = func(*args, **kwargs)
            if func is torch.Tensor.copy_:
                return out
            if target is not None and any(out is t and marked(t) != target for t in tensors):
                out = out.clone()  # moved: another tensor
            if tensors and target is None:
                target = marked(tensors[0]) if func in _FREE else on
            return _mark(out, bool(target)) if target is not None else out

    @staticmethod
    def _target(func: Any, args: Any, kwargs: Any) -> bool | None:
        """Whether the call names a device, and whether that is the GPU."""
        named = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device)] if func is torch.Tensor.to else []
        named += [a for a in (*args[1:],) if isinstance(a, str) and a.startswith(("cuda", "cpu"))] if func is torch.Tensor.to else []
        named += [kwargs["device"]] if kwargs.get("device") is not None else []
        if func is torch.Tensor.to:
            named += [CUDA if marked(a) else torch.device("cpu") for a in args[1:] if isinstance(a, torch.Tensor)]
        return str(named[-1]).startswith("cuda") if named else None

    @staticmethod
    def _here(a: Any) -> Any:
        if isinstance(a, torch.device) and a.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(a, str) and a.startswith("cuda") else a


def backward_too(apply: Any) -> Any:
    """`torch.autograd.function.BackwardCFunction.apply` on the pretended GPU."""

    def on_gpu(self: Any, *grads: Any) -> Any:
        _backward[0] = True
        try:
            with PretendGpu():
                return apply(self, *grads)
        finally:
            _backward[0] = False

    return on_gpu
