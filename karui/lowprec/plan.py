"""What a recipe would do on a GPU that need not be there: per layer precision, backend, padding, speed-up and memory.

A roofline, not a measurement. A GEMM takes the longer of its arithmetic at the dense peak and its traffic at the memory's rate;
low precision adds the passes that quantize (each operand read once in 16 bit and written in its own width):

    t = max(2 M N K / peak, bytes / bandwidth) + quantization bytes / bandwidth

Peaks reach only part of the datasheet's on real GPUs, on both sides alike; small layers fare worse than this says.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from karui.configs.errors import KaruiError, nearest
from karui.lowprec.backends import auto_on
from karui.lowprec.policy import decide, padding
from karui.lowprec.precision import GEMMS, Gemm, GemmFormat, Precision
from karui.lowprec.sharing import readers


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Datasheet limits, dense, with fp32 accumulation: TFLOP/s by operand width (0: not in hardware), GB, TB/s, sm version.

    `source` is the paper, `checked` which of its values were compared with a copy of it.
    """

    name: str
    sm: int
    bf16: float
    fp8: float
    fp4: float
    memory_gb: float
    bandwidth_tb: float
    source: str
    checked: str

    @property
    def block_scaled(self) -> bool:
        """Whether MX and NVFP4 GEMMs are in hardware."""
        return self.sm >= 100


# Dense rates: a datasheet's "with sparsity" is halved. `checked` against tables on third parties' pages that copy them.
GPUS = {
    g.name: g
    for g in (
        Gpu(name="A100", sm=80, bf16=312, fp8=0, fp4=0, memory_gb=80, bandwidth_tb=2.039, checked="all values",
            source="A100 80GB SXM datasheet, nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf on nvidia.com"),
        Gpu(name="L40S", sm=89, bf16=362, fp8=733, fp4=0, memory_gb=48, bandwidth_tb=0.864, checked="all values",
            source="L40S datasheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
        Gpu(name="H100", sm=90, bf16=989, fp8=1979, fp4=0, memory_gb=80, bandwidth_tb=3.35, checked="all values",
            source="H100 SXM datasheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"),
        Gpu(name="H200", sm=90, bf16=989, fp8=1979, fp4=0, memory_gb=141, bandwidth_tb=4.8, checked="all values",
            source="H200 SXM datasheet, https://www.nvidia.com/en-us/data-center/h200/"),
        Gpu(name="B200", sm=100, bf16=2250, fp8=4500, fp4=9000, memory_gb=180, bandwidth_tb=7.7,
            checked="all values, of the 1,000 W board; other sheets give 8 TB/s",
            source="HGX B200 datasheet, https://www.nvidia.com/en-us/data-center/hgx/"),
        Gpu(name="RTX 4090", sm=89, bf16=165.2, fp8=330.3, fp4=0, memory_gb=24, bandwidth_tb=1.008, checked="all values",
            source="Ada GPU architecture whitepaper, nvidia-ada-gpu-architecture.pdf on images.nvidia.com"),
        Gpu(name="RTX 5090", sm=120, bf16=209.5, fp8=419, fp4=1676, memory_gb=32, bandwidth_tb=1.792,
            checked="fp4, memory, bandwidth; bf16 and fp8 (fp32 sums) are quarters of the sparse 838 and 1,676",
            source="RTX Blackwell GPU architecture whitepaper, nvidia-rtx-blackwell-gpu-architecture.pdf on images.nvidia.com"),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One linear on the planned GPU.

    Attributes:
        formats: the recipe's, or "high".
        hardware: what multiplies: "fp8 tensor cores", "fp4 tensor cores", or "emulated in bf16" where the GPU lacks the format.
        backend: who asks it to: the recipe's, for `auto` what that would take there; "torch" for layers that stay high.
        speed_up: of the three GEMMs against bf16; 1 for layers that stay high.
        saved_bytes: activations kept for the backward pass in 16 bit minus those kept as codes; layers that read one input keep
            one copy of it between them either way, and each has its share here.
        seconds, high_seconds: the GEMMs of one micro-batch as planned, and in bf16.
    """

    name: str
    formats: str
    hardware: str
    backend: str
    reason: str
    padding: str
    speed_up: float
    saved_bytes: int
    seconds: float
    high_seconds: float


def find_gpu(name: str) -> Gpu:
    """A GPU by name, however it is cased or spaced. Raises `KaruiError` naming the known ones."""
    wanted = name.upper().replace(" ", "").replace("-", "").removeprefix("NVIDIA").replace("RTX", "")
    for gpu in GPUS.values():
        if gpu.name.upper().replace(" ", "").replace("RTX", "") == wanted:
            return gpu
    raise KaruiError(f"GPU {name!r} is not in the table; known: {', '.join(GPUS)}.{nearest(name, GPUS)}")


def plan_layers(model: nn.Module, precision: Precision, gpu: str, tokens: int) -> list[LayerPlan]:
    """The plan of every linear of `model` (which may be on the meta device) for micro-batches of `tokens` tokens.

    Raises:
        KaruiError: an unknown GPU, no tokens, or what the layer policy raises.
    """
    card = find_gpu(gpu)
    if tokens < 1:
        raise KaruiError(f"a plan needs tokens per micro-batch, got {tokens}.")
    formats = precision.at(0)
    out = []
    backend = auto_on(precision, divmod(card.sm, 10)).backend if precision.backend == "auto" else precision.backend
    reasons = decide(model, precision)
    low_names = {n for n, reason in reasons.items() if not reason}
    for name, reason in reasons.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        shape = (tokens, linear.in_features, linear.out_features)
        gemms: tuple[Gemm, ...] = GEMMS if linear.weight.requires_grad else ("fprop", "dgrad")
        high = sum(_seconds(card, "high", shape) for _ in gemms)
        if reason:
            out.append(LayerPlan(name=name, formats="high", hardware="bf16 tensor cores", backend="torch", reason=reason,
                                 padding="", speed_up=1.0, saved_bytes=0, seconds=high, high_seconds=high))  # fmt: skip
            continue
        low = sum(_seconds(card, formats[g], shape) for g in gemms)
        lacking = sorted({formats[g] for g in gemms if formats[g] != "high" and not _peak(card, formats[g])})
        width = {_width(formats[g]) for g in gemms if formats[g] != "high"}
        shares = precision.operands("fprop", formats["fprop"])[0] == precision.operands("wgrad", formats["wgrad"])[1]
        kept_as_codes = shares and precision.operands("fprop", formats["fprop"])[0].symmetric and "wgrad" in gemms
        out.append(
            LayerPlan(
                name=name,
                formats=formats["fprop"] if len(set(formats.values())) == 1 else "/".join(formats[g] for g in GEMMS),
                hardware="emulated in bf16" if lacking else f"fp{8 * max(width, default=2):.0f} tensor cores",
                backend=backend,
                reason=f"{card.name} has no {', '.join(lacking)}" if lacking else f"sm_{card.sm}",
                padding=padding(linear, precision),
                speed_up=high / low,
                seconds=low,
                high_seconds=high,
                saved_bytes=round(tokens * linear.in_features / len(readers(name, low_names))) if kept_as_codes else 0,
            )
        )
    return out


def _width(form: GemmFormat) -> float:
    """Bytes per value."""
    return 2.0 if form == "high" else 0.5 if form in ("mxfp4", "nvfp4") else 1.0


def _peak(gpu: Gpu, form: GemmFormat) -> float:
    if form == "high":
        return gpu.bf16
    if form in ("mxfp8", "mxfp4", "nvfp4"):
        return (gpu.fp8 if form == "mxfp8" else gpu.fp4) if gpu.block_scaled else 0.0
    return gpu.fp8 if gpu.fp8 and (form != "fp8-blockwise" or gpu.sm >= 90) else 0.0


def _seconds(gpu: Gpu, form: GemmFormat, shape: tuple[int, int, int]) -> float:
    t, k, n = shape
    operands, result = t * k + n * k, t * n  # the three GEMMs move the same three matrices, in turn
    width, peak = _width(form), _peak(gpu, form)
    quantize = 0.0 if form == "high" else operands * (2 + width) / (gpu.bandwidth_tb * 1e12)
    if not peak:
        width, peak = 2.0, gpu.bf16
    return max(2 * t * k * n / (peak * 1e12), (operands * width + result * 2) / (gpu.bandwidth_tb * 1e12)) + quantize
