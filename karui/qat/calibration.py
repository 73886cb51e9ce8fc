"""Block-by-block calibration of a transformers causal LM with bounded memory, on CPU or GPU.

    rows [samples, length] -> embedding -> hidden [samples, length, width]
    for each block:  the method sees the block's inputs, chooses codes, and writes the dequantized weights into the block
                     hidden <- block(hidden)                     so later blocks see the already quantized prefix

Held at any moment: the model, the hidden states of all rows at ONE block boundary (fp32, samples x length x width x 4 bytes;
twice for
methods that also follow the unquantized model), and what the method keeps for one block. With a work folder the hidden states
lie in a memory-mapped file and every finished block is written there, so that a killed run continues and ends bit-identically.

Rows all have one length, so there is no padding and no mask beyond the causal one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.qat.experts import is_expert
from karui.qat.types import LayerReport

log = logging.getLogger(__name__)
_EXPERT_OUT = ("down_proj", "w2")  # reads what the expert's other linears computed


class _Stop(Exception):
    """Raised inside a forward pass once the wanted input has been seen."""


class HiddenStates:
    """fp32 [samples, length, width] at one block boundary, in memory or in a memory-mapped file."""

    def __init__(self, shape: tuple[int, int, int], file: Path | None = None) -> None:
        size = shape[0] * shape[1] * shape[2]
        if file is None:
            self.data = torch.empty(shape)
        else:
            self.data = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32).view(shape)


@dataclass(frozen=True)
class Group:
    """Linears that read the same tensor, hence share its statistics (q, k, v; gate and up)."""

    names: tuple[str, ...]
    routed: bool = False  # sees only some of the tokens: a linear of a mixture-of-experts


Stage = tuple[Group, ...]


@dataclass
class Block:
    """One decoder block under quantization: its linears, their inputs, and where results go.

    Attributes:
        name: e.g. `model.layers.3`; weights are named `{name}.{path}.weight`.
        linears: the targeted linears of the block by weight name, in module order.
        specs: the grid of each.
        kwargs: what the model passes to this block besides the hidden states.
        inputs: hidden states from the already quantized prefix; targets: from the unquantized model, when followed.
    """

    index: int
    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]
    specs: dict[str, QuantSpec]
    kwargs: dict[str, Any]
    inputs: torch.Tensor
    targets: torch.Tensor | None
    batch: int
    device: torch.device
    seed: int
    weights: dict[str, QTensor | torch.Tensor] = field(default_factory=dict)
    report: list[LayerReport] = field(default_factory=list)
    next_targets: torch.Tensor | None = None
    _replay: dict[nn.Module, tuple[nn.Linear, list[torch.Tensor], bool]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.inputs.shape[0] * self.inputs.shape[1]

    @property
    def linears_all(self) -> dict[str, nn.Linear]:
        """Every linear of the block by weight name, targeted or not."""
        return {f"{self.name}.{n}.weight": m for n, m in self.module.named_modules() if isinstance(m, nn.Linear)}

    def slices(self) -> list[slice]:
        return [slice(i, min(i + self.batch, len(self.inputs))) for i in range(0, len(self.inputs), self.batch)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block on hidden states [b, length, width]; gradient flows unless the caller forbids it."""
        out = self.module(x, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def generator(self) -> torch.Generator:
        """Random numbers that depend on seed and block alone, so that a resumed run draws the same ones."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.index)

    # results

    def commit(self, name: str, q: QTensor, report: LayerReport) -> None:
        """Take `q` as the final codes of weight `name`: the block computes with exactly `q.dequantize()` from here on."""
        weight = self.linears[name].weight
        weight.data.copy_(q.dequantize(weight.dtype))
        self.weights[name] = q.to("cpu")
        self.report.append(report)

    # inputs of linears

    def stages(self) -> list[Stage]:
        """Linears in execution order, grouped by the tensor they read; found by running one row, not by their names.

        Linears that see only some of the tokens (experts) come together: first all that read the experts' input, then all that
        read what those computed. Those never run in the probe are among the first unless their name says otherwise.
        """
        seen: list[tuple[str, torch.Tensor, int]] = []
        hooks = [
            m.register_forward_pre_hook(lambda _, args, name=n: seen.append((name, args[0], args[0][..., 0].numel())))
            for n, m in self.linears.items()
        ]
        rows = self.inputs[: min(self.batch, len(self.inputs))].to(self.device)
        try:
            with torch.no_grad():
                self.forward(rows)
        finally:
            for hook in hooks:
                hook.remove()
        whole = rows[..., 0].numel()
        stages: list[Stage] = []
        routed: dict[int, list[str]] = {}
        last: torch.Tensor | None = None
        for name, x, tokens in seen:
            if tokens != whole or is_expert(name):
                routed.setdefault(id(x), []).append(name)
            elif x is last:
                stages[-1] = (Group((*stages[-1][0].names, name)),)
            else:
                stages.append((Group((name,)),))
                last = x
        missing: dict[str, list[str]] = {}  # gate and up of an expert that the probe did not reach share their input, too
        for n in self.linears:
            if n not in {s[0] for s in seen}:
                expert, _, part = n.removesuffix(".weight").rpartition(".")
                missing.setdefault(f"{expert}.down" if part in _EXPERT_OUT else expert, []).append(n)
        groups = [Group(tuple(v), routed=True) for v in (*routed.values(), *missing.values())]
        outer = tuple(g for g in groups if g.names[0].removesuffix(".weight").rpartition(".")[2] in _EXPERT_OUT)
        stages += [stage for stage in (tuple(g for g in groups if g not in outer), outer) if stage]
        self._find_replays(stages)
        return stages

    def capture(self, stage: Stage) -> Iterator[tuple[Group, torch.Tensor]]:
        """Inputs [tokens, in] of the stage's groups, batch by batch, the block as it stands now.

        A stage of one group stops the forward pass as soon as its input is known. Where a submodule's output is the output of
        that linear (o_proj in attention, down_proj in the MLP), its input is kept, and later passes start from it: in one
        tensor for all rows, since many pieces of some MB, freed again, leave a heap in which the next ones find no room.
        """
        first = {g: self.linears[g.names[0]] for g in stage}
        early = len(stage) == 1 and not stage[0].routed
        alone = first[stage[0]] if early and len(stage[0].names) == 1 else None
        parents = [parent for parent, (last, *_) in self._replay.items() if last is alone]
        keep: list[torch.Tensor] = []
        whole: torch.Tensor | None = None
        for rows in self.slices():
            found: list[tuple[Group, torch.Tensor]] = []

            def hook(_: nn.Module, args: tuple[torch.Tensor, ...], group: Group, found: list[Any] = found) -> None:
                found.append((group, args[0]))
                if early:
                    raise _Stop

            hooks = [m.register_forward_pre_hook(lambda mod, a, g=g: hook(mod, a, g)) for g, m in first.items()]
            try:
                with torch.no_grad(), self._replaying(rows), contextlib.suppress(_Stop):
                    self.forward(self.inputs[rows].to(self.device))
            finally:
                for h in hooks:
                    h.remove()
            for group, x in found:
                if parents:
                    each = len(x) // (rows.stop - rows.start)  # 1, or tokens where a module flattens them
                    if whole is None:
                        whole = x.new_empty((len(self.inputs) * each, *x.shape[1:]))
                    keep.append(whole[rows.start * each : rows.stop * each].copy_(x))
                yield group, x.reshape(-1, x.shape[-1])
        for parent in parents:
            last, _, as_tuple = self._replay[parent]
            self._replay[parent] = (last, keep, as_tuple)

    def propagate(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Outputs of the block as it stands now, batch by batch; names the layer when they are not finite."""
        for rows in self.slices():
            with torch.no_grad(), self._replaying(rows):
                out = self.forward(self.inputs[rows].to(self.device))
            if not torch.isfinite(out).all():
                raise KaruiError(self.diagnose(rows))
            yield rows, out
        self.forget()

    def forget(self) -> None:
        """Drop kept inputs: needed after changing a weight that a capture has already passed."""
        self._replay = {k: (v[0], [], v[2]) for k, v in self._replay.items()}

    def diagnose(self, rows: slice) -> str:
        """Which module of the block first gives NaN or Inf."""
        self.forget()
        found: list[str] = []

        def hook(module: nn.Module, args: Any, out: Any, name: str) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if not found and isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
                found.append(name)

        hooks = [m.register_forward_hook(lambda m, a, o, n=n: hook(m, a, o, n)) for n, m in self.module.named_modules() if n]
        try:
            with torch.no_grad():
                self.forward(self.inputs[rows].to(self.device))
        finally:
            for h in hooks:
                h.remove()
        where = f"{self.name}.{found[0]}" if found else self.name
        return (
            f"{where}: its output holds NaN or infinite values on the calibration rows {rows.start}-{rows.stop - 1}; "
            "the weights or the precision are at fault (half precision overflows: calibrate in float32), not the grid."
        )

    def _find_replays(self, stages: list[Stage]) -> None:
        """Submodules whose output is exactly the output of one of their linears: they can be rerun from that linear's input."""
        names = {id(m): n for n, m in self.module.named_modules()}
        last = [self.linears[s[0].names[0]] for s in stages if len(s) == 1 and len(s[0].names) == 1 and not s[0].routed]
        pairs = []
        for linear in last:
            path = names[id(linear)].rpartition(".")[0]
            if path:
                pairs.append((self.module.get_submodule(path), linear))
        outputs: dict[Any, Any] = {}
        hooks = [m.register_forward_hook(lambda m, a, o: outputs.__setitem__(m, o)) for pair in pairs for m in pair]
        try:
            with torch.no_grad():
                self.forward(self.inputs[:1].to(self.device))
        finally:
            for h in hooks:
                h.remove()
        self._replay = {}
        for parent, linear in pairs:
            out = outputs.get(parent)
            as_tuple = isinstance(out, tuple)
            value: Any = out[0] if isinstance(out, tuple) else out
            whole = not isinstance(out, tuple) or (len(out) == 2 and out[1] is None)
            if value is not None and value is outputs.get(linear) and whole:
                self._replay[parent] = (linear, [], as_tuple)

    @contextlib.contextmanager
    def _replaying(self, rows: slice) -> Iterator[None]:
        index, patched = rows.start // self.batch, []
        for parent, (linear, kept, as_tuple) in self._replay.items():
            if len(kept) > index:

                def forward(*_: Any, x: Any = kept[index], linear: Any = linear, as_tuple: bool = as_tuple, **__: Any) -> Any:
                    return (linear(x), None) if as_tuple else linear(x)

                parent.forward = forward
                patched.append(parent)
        try:
            yield
        finally:
            for parent in patched:
                del parent.forward


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList, str]:
    """The decoder stack of a transformers causal LM, its blocks, and the blocks' name prefix (`model.layers`)."""
    get: Any = getattr(model, "get_decoder", None)
    base: Any = get() if get is not None else getattr(model, "model", None)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise KaruiError(
            f"{type(model).__name__}: no list of decoder blocks found; post-training methods need a decoder-only model."
        )
    prefix = next(n for n, m in model.named_modules() if m is layers)
    return base, layers, prefix


def block_arguments(model: nn.Module, length: int) -> tuple[list[dict[str, Any]], Any]:
    """Keyword arguments each block gets for rows of `length` tokens, and a function rows [b, length] -> embeddings.

    Taken from the model's own forward pass with its blocks replaced by recorders; arguments are those of a single row, which
    broadcast over any batch because rows are neither padded nor packed.
    """
    base, layers, _ = decoder_of(model)
    kwargs: list[dict[str, Any]] = []
    first: list[torch.Tensor] = []

    class Recorder(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.attention_type = getattr(block, "attention_type", None)  # some stacks choose the mask by it

        def forward(self, hidden: torch.Tensor, *args: Any, **named: Any) -> Any:
            if args:
                raise KaruiError(
                    f"{type(model).__name__}: its blocks take positional arguments, which calibration does not follow."
                )
            first.append(hidden)
            kwargs.append(
                {k: v for k, v in named.items() if k not in ("cache", "past_key_values", "past_key_value", "use_cache")}
            )
            return (hidden, None) if as_tuple else hidden

    blocks, as_tuple = list(layers), False

    def embed(rows: torch.Tensor) -> torch.Tensor:
        first.clear()
        kwargs.clear()
        with torch.no_grad():
            base(input_ids=rows, use_cache=False)
        return first[0]

    def recorded(rows: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(blocks):
            layers[i] = Recorder(block)
        try:
            return embed(rows)
        finally:
            for i, block in enumerate(blocks):
                layers[i] = block

    row = torch.zeros((1, length), dtype=torch.long, device=next(base.parameters()).device)
    try:
        recorded(row)
    except ValueError:  # the stack unpacks what its blocks return (Bamba)
        as_tuple = True
        recorded(row)
    return [dict(k) for k in kwargs], recorded


def check_rows(rows: torch.Tensor, vocab: int, width: int) -> None:
    """Refuse calibration rows that cannot calibrate: empty, of a wrong form, or fewer tokens than the widest linear has
    inputs."""
    if rows.ndim != 2 or rows.dtype not in (torch.int64, torch.int32) or rows.numel() == 0:
        raise KaruiError(
            f"calibration rows: expected token ids [samples, length], got {rows.dtype} of shape {tuple(rows.shape)}; "
            "give a text long enough for at least one row."
        )
    if int(rows.min()) < 0 or int(rows.max()) >= vocab:
        raise KaruiError(
            f"calibration rows hold token id {int(rows.max() if rows.max() >= vocab else rows.min())}, the model has {vocab}; "
            "tokenize with the model's own tokenizer."
        )
    if rows.numel() < width:
        raise KaruiError(
            f"calibration set too small: {rows.numel()} tokens, but the widest linear has {width} inputs, so its statistics "
            f"would have no full rank; give at least {width} tokens, better {8 * width}."
        )
