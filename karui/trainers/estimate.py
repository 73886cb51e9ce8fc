"""Memory and floating-point operations of a training step, from shapes alone: no weights are loaded.

Legend: T tokens of a micro-batch, S of them supervised, L layers, H hidden, F feed-forward width, Q = heads * head size,
K = key-value heads * head size, V vocabulary, r adapter rank, b bytes of the compute dtype, B of the residual stream's.

Memory per rank, in bytes
  weights      each matrix at the bits of its grid, everything else at the model's dtype; not counted: 2 KB per matrix
  adapter      r (in + out) per target, fp32
  gradients    one value per trained parameter in its dtype;   optimizer: two (AdamW's moments)
  activations  what the layers keep for the backward pass, T * L times
                 2 H B                    the inputs of the two norms
                 (2 Q + 2 K) b            q, k, v and the attention's output
                 2 F b                    gate and up
                 H b, H b                 the inputs of q/k/v and of gate/up, each only if a weight there is trained
                 F b                      the input of down, only when its own weight is trained (an adapter makes it again)
                 (Q + K) b                only with norms on q and k
                 r b                      per adapter
               in the last layer only S rows go on after the attention, Q b more of each if o is trained
               and S * H * B for the input of the last norm
               and with recompute=full T * L * H B, plus one layer of the above
  logits       min(chunk, S) * V * 4, and S * H * b for the gradient of the supervised hidden states
  head         only when the head is trained: its gradient twice in fp32, while it is scaled
  working      the largest moment of the backward pass of one layer: 4 T F b, plus one dequantized matrix if the base has a grid
  peak         weights + adapter + gradients + optimizer + activations + max(logits + head, working)
These are live tensors, which tests hold to 5 % of what autograd keeps. A process holds more: its libraries, and on a CPU what
malloc keeps of freed pieces (`karui.trainers.preflight.SLACK`).

Operations per step, with N the weights of the linears except the head, n the documents' lengths
  forward      2 N T + 2 Q L sum(n^2) + 2 V H S          (causal: half of the square)
  backward     2 N T for the input's gradient, 2 N' T for the N' trained weights, 5/2 of the attention, and the head's 2 V H S
               (twice that when it is trained); o, gate, up and down of the last layer see S rows, not T
  adapters     6 P T for P parameters (2 forward, 4 backward);   recompute=full: the body's forward pass once more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import Recipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_COMPUTE = {"bf16": 2, "fp16": 2}
_ATTENTION_IN, _GATE_UP, _DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)
_AFTER_ATTENTION = ("o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear of the body: its full name and shape."""

    name: str
    out: int
    width: int

    @property
    def size(self) -> int:
        return self.out * self.width


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes the formulas need.

    Attributes:
        linears: the body's linears (the head is not one of them).
        experts: the stacked matrices of a mixture's experts, each stack as one; in no formula but that of an export's bytes.
        parameters: all parameters, tied ones once.
        head: V * H; also part of `parameters`.
        tied: head and embedding are one matrix.
        q_norm: norms on q and k keep those once more.
        known: the architecture is of the shape the activation formula describes.
    """

    layers: int
    hidden: int
    ffn: int
    q: int
    kv: int
    vocab: int
    linears: tuple[Linear, ...]
    parameters: int
    tied: bool
    q_norm: bool
    known: bool
    experts: tuple[Linear, ...] = ()

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def body(self) -> int:
        """Weights of all linears in the body."""
        return sum(x.size for x in self.linears)


def skeleton(config: Any) -> Any:
    """The model of a transformers config without storage: parameters have shapes and nothing else."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shape_of(model: Any) -> ModelShape:
    """Read the sizes off a transformers causal LM (a `skeleton`, or one with weights)."""
    from torch import nn

    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    linears = tuple(Linear(name=n, out=m.out_features, width=m.in_features) for n, m in model.named_modules()
                    if isinstance(m, nn.Linear) and m is not head)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    leaves = {x.name.rpartition(".")[2] for x in linears}
    tied = head.weight is model.get_input_embeddings().weight or bool(getattr(config, "tie_word_embeddings", False))
    parameters = sum(p.numel() for p in model.parameters())  # a shared one is listed once
    if tied and head.weight is not model.get_input_embeddings().weight:
        parameters -= head.weight.numel()
    return ModelShape(
        layers=config.num_hidden_layers, hidden=config.hidden_size, ffn=config.intermediate_size, q=heads * size,
        kv=(getattr(config, "num_key_value_heads", None) or heads) * size, vocab=head.weight.shape[0], linears=linears,
        parameters=parameters, tied=tied, q_norm=any(n.endswith("q_norm") for n, _ in model.named_modules()),
        experts=tuple(Linear(name=n, out=p.shape[:-1].numel(), width=p.shape[-1]) for n, p in model.named_parameters()
                      if p.ndim == 3 and "expert" in n),
        known={"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= leaves and not any(
            "expert" in x.name for x in linears))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the recipe's prepare steps make of a model.

    Attributes:
        targets: linears with an adapter, or all of them when nothing is frozen.
        adapter: parameters of the adapter; 0 when the whole model is trained.
        full: the model's own weights are trained.
        base: grid of the linears' weights.
        rank: adapter rank.
    """

    targets: frozenset[str]
    adapter: int
    full: bool
    base: QuantSpec
    rank: int

    def trained(self, shape: ModelShape) -> int:
        return shape.parameters if self.full else self.adapter


def trained_by(recipe: Recipe, model: Any, shape: ModelShape) -> Trained:
    """Which weights a recipe trains; `model` may be a skeleton.

    Raises:
        KaruiError: adapter targets that match nothing, or a rank above a matrix's dimensions.
    """
    from karui.adapters.size import adapter_size

    none = QuantSpec.parse("none")
    for step in recipe.prepare:
        if (found := adapter_size(model, step)) is not None:
            return Trained(targets=frozenset(found[0]), adapter=found[1], full=False, base=getattr(step, "base", none),
                           rank=getattr(step, "rank", 0))
    return Trained(targets=frozenset(x.name for x in shape.linears), adapter=0, full=True, base=none, rank=0)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What plans need of a recipe's model: its skeleton, its sizes, and what is trained of it."""

    model: Any
    shape: ModelShape
    trained: Trained


def outline(recipe: Recipe) -> Outline:
    """From the model's config alone."""
    from karui.catalogue import load_model_config
    from karui.trainers.model import weights_folder
    from karui.trainers.stages import planned

    model = skeleton(planned(recipe, load_model_config(weights_folder(recipe.model.name)))[0])
    shape = shape_of(model)
    return Outline(model=model, shape=shape, trained=trained_by(recipe, model, shape))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per rank; see the module's formulas. `loading`: the high-precision weights beside what they become."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    head: int
    working: int
    loading: int

    @property
    def peak(self) -> int:
        kept = self.weights + self.adapter + self.gradients + self.optimizer + self.activations
        return max(self.loading, kept + max(self.logits + self.head, self.working))


def memory(recipe: Recipe, shape: ModelShape, trained: Trained, *, tokens: int, supervised: int) -> Memory:
    """Bytes at the largest micro-batch, of `tokens` tokens of which `supervised` carry loss."""
    dtype = BYTES[recipe.model.dtype]
    grid = weight_bytes(shape.linears, trained.base, dtype)
    weights = grid + (shape.parameters - shape.body) * dtype
    count, size = trained.trained(shape), dtype if trained.full else 4
    compute = _COMPUTE.get(recipe.run.precision, dtype)
    early, late = activation_bytes_per_layer(shape, trained, residual=dtype, compute=compute)
    silent = shape.layers and (tokens - supervised) * late
    if recipe.run.recompute == "none":
        activations = tokens * shape.layers * (early + late) - silent
    else:
        activations = tokens * (shape.layers * shape.hidden * dtype + early + late)
    if "o_proj" in {name.rpartition(".")[2] for name in trained.targets}:
        activations += supervised * shape.q * compute  # the rows of the last layer that go on are a copy
    quantized = trained.base.format != "none"
    largest = max(x.size for x in shape.linears) * compute if quantized or compute != dtype else 0
    head_trained = trained.full
    return Memory(
        weights=weights, adapter=trained.adapter * 4, gradients=count * size,
        optimizer=optimizer_bytes(recipe.optim.name, count, size),
        activations=round(activations + supervised * shape.hidden * dtype),
        logits=min(recipe.objective.chunk_tokens, supervised) * shape.vocab * 4
        + supervised * shape.hidden * compute, head=2 * shape.head * 4 if head_trained else 0,
        working=4 * tokens * shape.ffn * compute + largest,
        loading=shape.parameters * dtype + (grid if quantized else 0))


def activation_bytes_per_layer(shape: ModelShape, trained: Trained, *, residual: int, compute: int) -> tuple[float, float]:
    """What one layer keeps per token up to its attention and after it, in bytes, averaged over the layers."""
    by_leaf: dict[str, int] = {}
    for name in trained.targets:
        leaf = name.rpartition(".")[2]
        by_leaf[leaf] = by_leaf.get(leaf, 0) + 1

    def share(leaves: tuple[str, ...]) -> float:
        """The share of layers in which the input of these linears is kept."""
        return min(1.0, max((by_leaf.get(leaf, 0) for leaf in leaves), default=0) / shape.layers)

    def adapters(leaves: tuple[str, ...]) -> float:
        return 0 if trained.full else trained.rank * sum(by_leaf.get(leaf, 0) for leaf in leaves) / shape.layers

    early = 2 * shape.q + 2 * shape.kv + shape.hidden * share(_ATTENTION_IN) + adapters(_ATTENTION_IN)
    early += (shape.q + shape.kv) if shape.q_norm else 0
    late = 2 * shape.ffn + shape.hidden * share(_GATE_UP) + adapters(_AFTER_ATTENTION)
    late += shape.ffn * share(_DOWN) if trained.full else 0
    return shape.hidden * residual + early * compute, shape.hidden * residual + late * compute


def after_attention(shape: ModelShape, trained: Trained) -> tuple[int, int]:
    """Weights of the last layer's linears after its attention, and their adapters' parameters: they see supervised rows only."""
    last = {x.name.rpartition(".")[2]: x for x in shape.linears}
    found = [last[leaf] for leaf in _AFTER_ATTENTION if leaf in last]
    return sum(x.size for x in found), sum(trained.rank * (x.out + x.width) for x in found if x.name in trained.targets)


def optimizer_bytes(name: str, count: int, size: int) -> int:
    """States of an optimizer on the device, for `count` trained values of `size` bytes; small tensors counted as large ones."""
    if "paged" in name:
        return 0
    if name in ("adamw8bit", "adamw-fp8", "bnb-adamw8bit"):
        return 2 * count + 2 * 4 * (count // 256)
    return {"adafactor": 0, "muon": 1}.get(name, 2) * count * size


def weight_bytes(linears: tuple[Linear, ...], spec: QuantSpec, dtype_bytes: int) -> int:
    """Bytes of these matrices on a grid, scales of whole rows and tensors included; grid none: at the dtype."""
    if spec.format == "none":
        return sum(x.size for x in linears) * dtype_bytes
    scale = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1, "e4m3": 1}[spec.scale_dtype]
    rows = {"channel": sum(x.out for x in linears), "tensor": len(linears)}.get(spec.granularity, 0)
    return round(sum(x.size for x in linears) * spec.bits_per_weight / 8) + rows * scale


def step_flops(recipe: Recipe, shape: ModelShape, trained: Trained, *, tokens: float, supervised: float,
               squared_lengths: float) -> float:
    """Floating-point operations of one optimizer step; `squared_lengths`: the sum of the documents' squared lengths."""
    late, late_adapter = after_attention(shape, trained)
    silent = tokens - supervised
    body = 2.0 * (shape.body * tokens - late * silent)
    attention = 2.0 * shape.q * shape.layers * squared_lengths
    head = 2.0 * shape.head * supervised
    adapter = 0.0 if trained.full else 6.0 * (trained.adapter * tokens - late_adapter * silent)
    forward = body + attention
    backward = body + 2.5 * attention + (body if trained.full else 0)
    again = forward if recipe.run.recompute == "full" else 0
    return forward + backward + again + head * (3 if trained.full else 2) + adapter


def forward_flops(shape: ModelShape, trained: Trained, *, tokens: float, supervised: float, squared_lengths: float) -> float:
    """Operations of an evaluation pass."""
    late, late_adapter = after_attention(shape, trained)
    rows = (shape.body + trained.adapter) * tokens - (late + late_adapter) * (tokens - supervised)
    return 2.0 * rows + 2.0 * shape.q * shape.layers * squared_lengths + 2.0 * shape.head * supervised


def step_traffic(recipe: Recipe, shape: ModelShape, trained: Trained, *, tokens: float, micros: float) -> float:
    """Bytes that the work beside the matrix products reads and writes in one step.

    Per token and layer: norms and residuals 24 H, rotary 12 (Q + K), SwiGLU 13 F values; per micro-batch: two passes over every
    dequantized weight (8.5 bytes each); per step: AdamW's 7 values per trained parameter.
    """
    value = _COMPUTE.get(recipe.run.precision, BYTES[recipe.model.dtype])
    elementwise = (24 * shape.hidden + 12 * (shape.q + shape.kv) + 13 * shape.ffn) * value * tokens * shape.layers
    elementwise *= 1.4 if recipe.run.recompute == "full" else 1
    dequantized = 2 * 8.5 * shape.body * micros if trained.base.format != "none" else 0
    return elementwise + dequantized + 7 * 4 * trained.trained(shape)
