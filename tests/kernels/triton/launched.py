"""Kernels as they are launched on a GPU that is not there, compiled for it.

    python -m tests.kernels.triton.launched [--cc 90] [--parts correct: QLoRA ...] [--no-compile]     one JSON line per kernel
    python -m tests.kernels.triton.launched --warmed [--parts engine ...]     what the benchmark measures and had not compiled before

`benchmarks/gpu.py` at its real widths, with tuning on, and the engine over more grids and caches run on meta tensors that say "cuda":
nothing is computed, and Triton's own launcher decides how each call is specialized (types, integers that are 1 or multiples of 16,
pointers on 16 bytes). A specialization is kept instead of launched, and compiled afterwards: a trap, more shared memory than the
chip has, or a compiler's error fails; registers and bytes of the stack, where spilled registers go, are printed. What a GPU refuses
is an error while walking: tensors of the host beside its own, a grid beyond CUDA's limits, and while a graph is captured a wait for
the GPU or a kernel that was not compiled before.

Numbers are known where they are few, integers, and made of what the host gave; else the host sees 0, and what lets a check pass.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from karui.kernels.triton_support.offline import SHARED_LIMIT, causes

CUDA, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}
FEW = 4096  # numbers that are computed on the host, too
_T: Any = torch.Tensor
_DEVICE = _T.device.__get__
_FLAGS = {_T.is_cuda.__get__: True, _T.is_meta.__get__: False, _T.is_cpu.__get__: False}
_BASE = 1 << 40  # where every allocation begins: aligned, as CUDA's are
_PLAIN = (torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
_COMPARED = {torch.equal, _T.equal, torch.allclose, _T.allclose}
_ASKED = {_T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__int__, _T.__float__, _T.__index__} | _COMPARED
_FAILS = {_T.any, torch.any, torch.isinf, _T.isinf, torch.isnan, _T.isnan}  # what checks hope to be false
_REPEATS = {torch.repeat_interleave, _T.repeat_interleave}
_AUTOCAST = {F.linear, torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, torch.addmm, F.scaled_dot_product_attention}


class Refused(RuntimeError):
    """What a GPU would refuse."""


@dataclass
class Launch:
    """One specialization of a kernel.

    Attributes:
        part: of the walk, in which it came first.
        grid: the largest, each way.
        elements: of the largest tensor.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: Any
    part: str
    grid: tuple[int, int, int] = (0, 0, 0)
    elements: int = 0

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.removeprefix('karui.kernels.')}.{self.kernel.fn.__name__}"

    # as Triton's launcher calls a compiled kernel
    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        if min(x, y, z) < 1 or x >= 1 << 31 or max(y, z) > 65535:
            raise Refused(f"{self.name}: a grid of {x} x {y} x {z}")
        if any(isinstance(a, torch.Tensor) and not a.is_cuda for a in rest):
            raise Refused(f"{self.name}: a pointer to the host's memory")
        self.grid = max(self.grid[0], x), max(self.grid[1], y), max(self.grid[2], z)
        self.elements = max(self.elements, *(a.numel() for a in rest if isinstance(a, torch.Tensor)))


@dataclass
class Gpu:
    """The GPU that is not there: what was launched on it."""

    cc: int
    launches: list[Launch]
    capturing: bool = False
    part: str = ""


class OnMeta(TorchFunctionMode):
    """Meta tensors that say "cuda"."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            on = any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves((args, kwargs)))
            # these are made anew at every look, so they are equal and not the same
            if func == _DEVICE:
                return CUDA if on else func(*args)
            for flag, value in _FLAGS.items():
                if func == flag:
                    return value if on else func(*args)
            if func in _PLAIN:
                return func(*args, **kwargs)
            if on and func is _T.data_ptr:
                return _BASE + args[0].storage_offset() * args[0].element_size()
            if on and func is _T.get_device:
                return 0
            if on and func is _T.__repr__:
                return "a tensor on cuda:0"
            if on and func in _ASKED:
                return self._asked(func, args)
            args, kwargs = tree_map(_here, (args, kwargs))
            if kwargs.pop("pin_memory", False) or (moved := self._moved(func, args, kwargs)) is None:
                return self._called(func, args, kwargs, on)
            return moved

    def _asked(self, func: Any, args: Any) -> Any:
        if self._gpu.capturing:
            raise Refused(f"{func.__name__} while a graph is captured")
        if func is _T.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        return func in _COMPARED or func(_value(args[0]))

    def _moved(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The result of a call that goes from one side to the other."""
        crosses, t = False, args[0] if args else None
        if func is _T.copy_:
            crosses = t.is_meta != args[1].is_meta
        elif func in (_T.to, _T.cpu):
            rest = (*args[1:], *kwargs.values())
            to = [torch.device(a) for a in rest if isinstance(a, (str, torch.device))]
            to += [a.device for a in rest if isinstance(a, torch.Tensor)]
            to += [HOST] if func is _T.cpu else []
            crosses = bool(to) and to[-1].type != t.device.type
        if crosses and self._gpu.capturing:
            raise Refused(f"{func.__name__} between the host and the GPU while a graph is captured")
        if not crosses or (func is _T.to and not t.is_meta):
            return None
        if func is _T.copy_:
            if t.is_meta:
                return t
            return t.copy_(_value(args[1]))
        return _value(t).to(next((a for a in rest if isinstance(a, torch.dtype)), t.dtype))

    def _called(self, func: Any, args: Any, kwargs: Any, on: bool) -> Any:
        if on and torch.is_autocast_enabled("cuda") and func in _AUTOCAST:  # meta tensors have no autocast of their own
            dtype = torch.get_autocast_dtype("cuda")
            args, kwargs = tree_map(lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, (args, kwargs))
        if on and func in _REPEATS and isinstance(args[1], torch.Tensor) and "output_size" not in kwargs:
            kwargs["output_size"] = int(_value(args[1]).sum())
        if "generator" in kwargs and (on or kwargs.get("device") == META):
            kwargs.pop("generator")
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:  # its shape depends on numbers
            host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
            return tree_map(_with_numbers, func(*host_args, **host_kwargs))
        changed = args[0] if func is _T.__setitem__ else out
        if isinstance(changed, torch.Tensor) and changed.is_meta:
            _know(changed, func, args, kwargs)
        return out


def _here(a: Any) -> Any:
    if isinstance(a, torch.device) and a.type == "cuda":
        return META
    return META if isinstance(a, str) and re.fullmatch(r"cuda(:\d+)?", a) else a


def _on_host(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return _value(a) if a.is_meta else a
    return HOST if isinstance(a, torch.device) else a


def _with_numbers(a: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    out = torch.empty(a.shape, dtype=a.dtype, device=META)
    out.numbers = a  # type: ignore[attr-defined]
    return out


def _numbers(t: torch.Tensor) -> torch.Tensor | None:
    """What is known of a tensor's numbers."""
    return getattr(t, "numbers", None) if t.is_meta else t


def _value(t: torch.Tensor) -> torch.Tensor:
    """What the host sees of a tensor."""
    if (numbers := _numbers(t)) is not None:
        return numbers
    return torch.full(t.shape, t.dtype == torch.bool and not getattr(t, "fails", False), dtype=t.dtype)


def _know(out: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Do on the host what made (or changed) `out`, if all of it is known there."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    again = any(out is t for t in tensors)
    if again and (not func.__name__.endswith("_") or _numbers(out) is None):
        return
    if not again:
        out.fails = func in _FAILS
        if out.is_floating_point() or out.numel() > FEW or func.__name__.startswith(("empty", "rand", "new_empty")):
            return
    if any(_numbers(t) is None for t in tensors):
        out.numbers = None
        return
    args, kwargs = tree_map(_on_host, (args, kwargs))
    made = func(*args, **kwargs)
    if not again:
        out.numbers = made


class _Nothing:
    """A stream, an event or a graph: all calls do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def pool(self) -> Any:
        return (0, 0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _cuda(gpu: Gpu) -> dict[str, Any]:
    """What `torch.cuda` answers."""
    card = SimpleNamespace(multi_processor_count=PROCESSORS[gpu.cc], name="a GPU that is not there", major=gpu.cc // 10,
                           minor=gpu.cc % 10, total_memory=141 << 30)  # fmt: skip

    @contextlib.contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        gpu.capturing = True
        try:
            yield
        finally:
            gpu.capturing = False

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    found = {name: always(None) for name in ("_lazy_init", "synchronize", "empty_cache", "_sleep", "set_device")}
    found |= dict.fromkeys(("Stream", "Event", "CUDAGraph", "current_stream"), _Nothing)
    found |= {name: lambda *args: contextlib.nullcontext() for name in ("stream", "device")}
    return found | {
        "is_available": always(True), "device_count": always(1), "current_device": always(0), "is_bf16_supported": always(True),
        "get_device_capability": always((card.major, card.minor)), "get_device_properties": always(card),
        "get_device_name": always(card.name), "mem_get_info": always((130 << 30, card.total_memory)), "memory_allocated": always(0),
        "is_current_stream_capturing": lambda: gpu.capturing, "graph": graph,
    }  # fmt: skip


@contextlib.contextmanager
def pretended(cc: int) -> Iterator[Gpu]:
    """A GPU of compute capability `cc` that keeps what is launched on it."""
    import torch._dynamo  # noqa: F401  (meta functions import it, and it looks at torch.cuda's own functions)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    gpu = Gpu(cc, [])

    def keep(self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any) -> Launch:
        launch = Launch(self, signature, constexprs, attrs, options, gpu.part)
        if gpu.capturing:
            raise Refused(f"{launch.name} is compiled while a graph is captured")
        gpu.launches.append(launch)
        self.device_caches[device][0][key] = launch
        return launch

    def backward(self: Any, *grads: Any) -> Any:  # autograd switches modes off
        with OnMeta(gpu):
            return apply(self, *grads)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")

    function = torch.autograd.function.BackwardCFunction
    apply = function.apply
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", cc, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0))  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        for name, value in _cuda(gpu).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(patch.object(JITFunction, "_do_compile", keep))
        stack.enter_context(patch.object(function, "apply", backward))
        stack.enter_context(OnMeta(gpu))
        yield gpu


def _script() -> Any:
    """`benchmarks/gpu.py`, as it is imported where there is a GPU."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# grid of the weights, cache, bits of the inputs, experts
SERVED = [("w8a8", "int8", 16, 0), ("nvfp4", "int4", 16, 0), ("w1.58a8", "kivi4", 16, 0), ("nf4", "kivi2", 16, 0), ("fp8", "fp8", 8, 0),
          ("mxfp4", "bfloat16", 16, 0), ("w4g32a", "float16", 16, 0), ("w2g32", "int8", 16, 0), ("w4g128", "fp8", 16, 8),
          ("fp8", "bfloat16", 8, 8), ("w8a8", "int4", 16, 8), ("mxfp8", "fp8", 16, 8)]  # fmt: skip


def served(script: Any, spec: str, kv_dtype: str, activation_bits: int, experts: int) -> None:
    """Graphs of all sizes, prompts short and long, decoding, drawing, and a tree of drafts where the cache takes one."""
    from karui.configs.quantspec import QuantSpec
    from karui.inference.batch import StepBatch
    from karui.inference.engine import Engine
    from karui.inference.models.config import from_hf
    from karui.inference.models.gpu import TritonRunner
    from karui.inference.models.weights import canonical
    from karui.inference.requests import SamplingParams
    from karui.kernels.quantize import quantize

    model = script.llama(1, experts, **({"intermediate_size": 1024} if experts else {}))
    weights = canonical({n: w for n, w in model.state_dict().items() if n != "lm_head.weight"})
    kept = ("embed_tokens.weight", "mlp.gate.weight")
    made = {n: quantize(w, QuantSpec.parse(spec)) if w.ndim == 2 and not n.endswith(kept) else w for n, w in weights.items()}
    runner = TritonRunner(from_hf(model.config.to_dict()), made, script.DEVICE, torch.bfloat16, activation_bits=activation_bits)
    engine = Engine(runner, kv_dtype=kv_dtype, memory="4GiB", max_context=2048, max_sequences=256)
    runner.warm_up(256, 2048 // engine.pool.block_size)
    engine.generate([[1] * n for n in (3, 900, 40)], SamplingParams(max_tokens=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01))
    if not kv_dtype.startswith("kivi"):
        tree, t = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool), torch.tensor
        runner.forward(StepBatch(t([1, 2, 3]), t([6, 7, 7]), t([6, 7, 8]), t([0, 3]), t([9]), t([[0, 1]]), t([0, 1, 2]), tree_masks=[tree]))


def walk(cc: int, parts: list[str], warmed: bool = False) -> tuple[list[Launch], list[str]]:
    """(what is launched, what failed) in the parts whose names hold one of `parts`, or in all. `warmed`: in the benchmark's speed half
    as it runs to compile its kernels and as it runs to be measured; what only the second launches has failed."""
    failed: list[str] = []
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]  # a peer, which looks for the real GPU
    with pretended(cc) as gpu:
        from karui.kernels.gemm_grouped import reference
        from karui.kernels.gemm_grouped import triton as grouped
        from karui.kernels.triton_support import tuning

        def group_rows(chosen: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
            found = by_kernel(chosen, *rest)
            if (known := getattr(chosen, "numbers", None)) is not None:  # other paths ask the host for what the kernel found
                for t, numbers in zip(found, reference.group_rows(known, *rest)):
                    t.numbers = numbers  # type: ignore[attr-defined]
            return found

        by_kernel, script = grouped.group_rows, _script()
        runs: dict[str, Callable[[], Any]] = {}
        if warmed:
            runs |= {f"warm: {name}": run for name, run in script.speed_parts(script.WARM).items()}
            runs |= script.speed_parts(replace(script.FULL, layers=6))
        else:
            runs |= {f"correct: {name}": run for name, (_, run) in script.checks().items()}
            # fewer layers and tokens launch nothing else
            runs |= script.speed_parts(replace(script.FULL, new=script.WARM.new, layers=6))
            runs |= {f"served: {', '.join(map(str, each))}": lambda each=each: served(script, *each) for each in SERVED
                     if cc >= 89 or each[2] == 16}  # fmt: skip
        every = patch.object(tuning, "_milliseconds", lambda run: run() or 1.0)
        with every, patch.object(grouped, "group_rows", group_rows):
            for name, run in runs.items():
                if parts and not any(part in name for part in parts):
                    continue
                gpu.part = name
                tuning.tune(not name.startswith("correct"))
                try:
                    run()
                except Exception as error:
                    if warmed and name.startswith("warm"):  # such as layers that are too few to come and go: nobody looks at it
                        continue
                    near = "".join(traceback.format_tb(error.__traceback__)[-12:])
                    failed.append(f"{name}: {type(error).__name__}: {str(error)[:600]}\n{near}")
    if warmed:
        failed += [f"{launch.part}: {launch.name} was not compiled beforehand" for launch in gpu.launches if not launch.part.startswith("warm")]
    return gpu.launches, failed


def compiled(launch: Launch, cc: int) -> dict[str, Any]:
    """What ptxas made of a launch: registers, bytes of the stack and of shared memory; or the error."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, options = launch.kernel.arg_names, launch.options
    row: dict[str, Any] = {
        "name": launch.name, "part": launch.part, "cc": cc, "warps": options.num_warps, "stages": options.num_stages,
        "types": {n: kind for n, kind in launch.signature.items() if kind != "constexpr"},
        "constants": {names[at[0]]: str(value) for at, value in launch.constexprs.items()},
        "by_16": [names[at[0]] for at, found in launch.attrs.items() if found], "grid": launch.grid, "elements": launch.elements,
    }  # fmt: skip
    try:
        source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
        made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options.__dict__)
    except Exception as error:  # whatever the compiler throws is the result
        return row | {"ok": False, "error": causes(error)}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    row |= {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    row["shared"], trap = int(made.metadata.shared), re.search(r"^\s*trap;", made.asm["ptx"], re.MULTILINE)
    return row | {"ok": row["shared"] <= SHARED_LIMIT[cc] and not trap}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cc", type=int, default=90, choices=sorted(PROCESSORS))
    parser.add_argument("--parts", nargs="*", default=[], help="parts of the walk's names")
    parser.add_argument("--no-compile", action="store_true", help="only walk")
    parser.add_argument("--warmed", action="store_true", help="only look for what the benchmark's speed half has not compiled before it measures")
    given = parser.parse_args()
    launches, failed = walk(given.cc, given.parts, given.warmed)
    print(f"{len(launches)} kernels", *failed, sep="\n", file=sys.stderr, flush=True)
    bad = len(failed)
    for launch in () if given.no_compile or given.warmed else launches:
        row = compiled(launch, given.cc)
        bad += not row["ok"]
        print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
