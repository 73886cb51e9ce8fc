"""A GPU that is not there: tensors that lie on the CPU and say "cuda", so that what is chosen by device runs as it would there.

Under `PretendGpu` a tensor moved to or made on "cuda" is marked, results of marked tensors are marked, and an operation on marked and
unmarked ones fails as it would on a real GPU (single numbers excepted). Autograd makes gradients out of sight and switches modes off, so
a custom function's backward pass gets a mode of its own (`backward_too`), in which every tensor counts as marked. Kernels run in Triton's
interpreter.

`pretend_graphs` adds CUDA graphs: what a capture calls, kernels too, is done again by a replay on the same memory, and what a capture
may not do (wait for the GPU, copy between it and the host) raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.cuda}
# what may name tensors of both sides, or only looks at one
_FREE = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__repr__}


_backward = [False]
_capturing = [False]
current_devices: list[torch.device] = []
"""What `torch.cuda.device` made current, in order."""
waits: list[str] = []
"""Calls that made the host wait for the GPU, in order."""
_WAITS = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero,
          torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}  # fmt: skip


@contextlib.contextmanager
def _current(device: Any) -> Any:
    current_devices.append(torch.device(device))
    yield


def marked(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and (_backward[0] or getattr(t, "on_gpu", False))


def _mark(out: Any, on: bool) -> Any:
    for t in tree_leaves(out):
        if isinstance(t, torch.Tensor):
            t.on_gpu = on
    return out


class PretendGpu(TorchFunctionMode):
    def __enter__(self) -> Any:
        self._device, torch.cuda.device = torch.cuda.device, _current
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.cuda.device = self._device
        super().__exit__(*error)

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
            if func in (torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type):
                return func(*args, **kwargs)
            if func == _SET_DATA:
                func(*args)
                return _mark(args[0], marked(args[1]))
            if func is torch.Tensor.numpy and on:
                raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
            target = self._target(func, args, kwargs)
            if func is torch.Tensor.cpu:
                target = False
            if on and func in _WAITS:
                waits.append(func.__name__)
            if _capturing[0] and ((on and func in _WAITS) or _crosses(func, target, tensors)):
                raise RuntimeError(f"{func.__name__}: operation not permitted when stream is capturing")
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


def _crosses(func: Any, target: bool | None, tensors: list[torch.Tensor]) -> bool:
    """Whether the call moves data between the host and the GPU."""
    if func in _MOVES:
        return len({marked(t) for t in tensors} | ({target} if target is not None else set())) > 1
    return func is torch.tensor and bool(target)


class _Capture(TorchDispatchMode):
    """Keeps what is called, to call it again on the same tensors; kernels arrive through `launch`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._inside_kernel or name.startswith(("empty", "new_empty")):
            return out
        if name in ("_local_scalar_dense", "nonzero", "_unique2") or (name == "index" and any(
                i is not None and i.dtype == torch.bool for i in args[1])):  # fmt: skip
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **(kwargs or {})))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return out

    def launch(self, run: Callable[[], Any]) -> Any:
        self.calls.append(run)
        self._inside_kernel = True
        try:
            return run()
        finally:
            self._inside_kernel = False


class _Graph:
    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.used: Any = None

    def pool(self) -> Any:
        return self.used

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def pretend_graphs(monkeypatch: Any) -> list[_Graph]:
    """`torch.cuda`'s graphs and streams as described above; returns the graphs as they are recorded."""
    from triton.runtime.interpreter import GridExecutor

    made: list[_Graph] = []
    active: list[_Capture] = []
    real = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = lambda: real(self, *args, **kwargs)  # noqa: E731
        return active[-1].launch(run) if active else run()

    @contextlib.contextmanager
    def graph(recorded: _Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        assert isinstance(stream, _Stream), "torch's own stream for captures is the first device's"
        recorded.used = pool if pool is not None else object()
        active.append(_Capture())
        _capturing[0] = True
        try:
            with active[-1]:
                yield
        finally:
            _capturing[0] = False
            recorded.calls = active.pop().calls
        made.append(recorded)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    for name, value in (("graph", graph), ("CUDAGraph", _Graph), ("Stream", _Stream), ("current_stream", _Stream),
                        ("stream", lambda stream: contextlib.nullcontext())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return made


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
