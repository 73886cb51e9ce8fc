"""`quantize_model`: a model folder in, final codes under Hugging Face weight names out, whatever the method."""

from __future__ import annotations

import fnmatch
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError, nearest
from karui.configs.quantspec import QuantSpec
from karui.kernels.native.heap import give_back
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import group_sizes
from karui.qat.calibration import Block, HiddenStates, block_arguments, check_rows, decoder_of
from karui.qat.experts import left_alone, unfuse
from karui.qat.methods import Method, method
from karui.qat.store import Store, fingerprint
from karui.qat.types import LayerReport, MethodConfig, Options, QuantizedModel

log = logging.getLogger(__name__)


def quantize_model(
    folder: str | Path, method_name: str, spec: QuantSpec | str, rows: torch.Tensor | None = None, options: Options | None = None,
    *, dtype: torch.dtype = torch.float32,
) -> QuantizedModel:  # fmt: skip
    """Quantize the linears in a model's blocks; embedding, head and norms stay in high precision, a tied head stays tied.

    Args:
        folder: a transformers model folder (`karui.catalogue.resolve` turns names into one).
        method_name: see `karui.qat.methods.METHODS`.
        spec: the grid, e.g. `w4g64`.
        rows: calibration token ids [samples, length] int64; None only for methods that need no data.
        options: see `Options`. dtype: in what the blocks are computed.

    Raises:
        KaruiError: unknown method or setting, a pattern that matches nothing, a group size that does not divide, a calibration
            set that is empty or too small, NaN or Inf (names the layer), an already quantized model.
    """
    path = Path(folder)
    config = read_config(path)
    return quantize_loaded(load(path, dtype), config, method_name, spec, rows, options, source=source_of(path))


def quantize_loaded(
    model: nn.Module, config: Mapping[str, Any], method_name: str, spec: QuantSpec | str, rows: torch.Tensor | None = None,
    options: Options | None = None, *, source: Any = None,
) -> QuantizedModel:  # fmt: skip
    """`quantize_model` on a transformers model in memory, which is changed in place: afterwards it computes with the result.

    Fused experts are taken apart first (`karui.qat.experts`), so their weights appear expert by expert. `source` goes into the
    fingerprint of a work folder.
    """
    started, options = time.perf_counter(), options or Options()
    chosen, seed, batch, work = method(method_name), options.seed, options.batch, options.work
    module = chosen.load()
    method_config: MethodConfig = module.CONFIG.build(options.settings)
    spec = QuantSpec.parse(spec) if isinstance(spec, str) else spec
    refuse_quantized(model, config)
    if fused := unfuse(model):
        log.info("%d fused mixtures of experts taken apart, so that each expert is quantized on its own", len(fused))
    device = torch.device(options.device)
    base, layers, prefix = decoder_of(model)
    model.eval().requires_grad_(False)
    config = dict(config)
    notes: list[LayerReport] = []
    if hasattr(module, "prepare_model"):  # methods that fold something into the whole model first
        notes = module.prepare_model(model, config, method_config, seed)
    specs = choose(layers, prefix, spec, options.targets, options.skip, options.overrides)
    if not chosen.keeps_zeros:
        _warn_of_zeros(model, specs, chosen.name)
    rows = _check_rows(rows, chosen, model, specs, layers, prefix)
    facts = {
        "method": chosen.name, "settings": method_config.model_dump(), "spec": str(spec), "seed": seed, "batch": batch,
        "calibration_tokens": 0 if rows is None else rows.numel(), "calibration_shape": None if rows is None else
        list(rows.shape),
    }  # fmt: skip
    store = None
    if work is not None:
        mark = {
            **facts, "specs": {k: str(v) for k, v in specs.items()}, "source": source, "torch": torch.__version__,
            "dtype": str(next(model.parameters()).dtype), "device": device.type,
        }  # fmt: skip
        store = Store(Path(work), fingerprint(mark, rows))
    done: dict[str, QTensor | torch.Tensor] = {}
    report: list[LayerReport] = []
    streams: dict[str, HiddenStates] = {}
    for block in _blocks(model, layers, prefix, specs, chosen, rows, batch, device, seed, store, streams):
        if block.linears and not block.report:
            module.quantize_block(block, method_config)
        _finish(block, done, report)
        if options.progress is not None:
            options.progress(block.index + 1, len(layers), time.perf_counter() - started)
    if chosen.finishes:
        assert rows is not None
        # what it reads stays in the work folder: a run killed after this, by its export say, does it again, with the same result
        facts |= module.finish_model(model, done, report, rows, streams["target"].data, method_config, seed)
    weights: dict[str, QTensor | torch.Tensor] = {}
    tied = _tied_head(model)
    for name, tensor in model.state_dict().items():
        if name != tied:
            weights[name] = done.get(name, tensor.detach().cpu())
    named = {r.name for r in report}
    for name, value in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(value, (nn.Linear, nn.Embedding)) and weight not in named:
            why = "tied to the embedding" if weight == tied else left_alone(name) or "outside the targets"
            report.append(LayerReport(name=weight, spec="none", method=chosen.name, note=why))
    facts["seconds"] = round(time.perf_counter() - started, 2)
    return QuantizedModel(weights=weights, report=report + notes, config=config, facts=facts, changed=done)


def _finish(block: Block, done: dict[str, Any], report: list[LayerReport]) -> None:
    missed = [n for n in block.linears if n not in block.weights]
    assert not missed, f"method left {missed} without codes"
    done.update(block.weights)
    report.extend(block.report)


def _blocks(
    model: nn.Module, layers: nn.ModuleList, prefix: str, specs: dict[str, QuantSpec], chosen: Method, rows: torch.Tensor | None,
    batch: int, device: torch.device, seed: int, store: Store | None, streams: dict[str, HiddenStates],
) -> Any:  # fmt: skip
    """Yield each block with its inputs; after the caller has quantized it, carry the hidden states over it and store it.

    `streams` holds the hidden states at the current boundary; for a method that finishes, `target` stays there at the end.
    """
    kwargs: list[dict[str, Any]] = [{} for _ in layers]
    finished = 0
    if store is not None:
        while finished < len(layers) and store.block(finished).is_file():
            finished += 1
    kinds = () if rows is None else ("hidden", "target") if chosen.follows else ("hidden",)
    if rows is not None and finished < len(layers):
        kwargs, embed = block_arguments(model, rows.shape[1])
        kwargs = [{k: _to(v, device) for k, v in one.items()} for one in kwargs]
        shape = (rows.shape[0], rows.shape[1], embed(rows[:1]).shape[-1])
        for kind in kinds:
            file = None if store is None else store.hidden(finished, kind)
            if file is not None and finished:
                _existing(file)
            streams[kind] = HiddenStates(shape, file)
            if finished == 0:
                for i in range(0, len(rows), batch):
                    streams[kind].data[i : i + batch] = embed(rows[i : i + batch])
    if rows is not None and finished == len(layers) and chosen.finishes:
        assert store is not None
        width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        streams["target"] = HiddenStates((*rows.shape, width), _existing(store.hidden(finished, "target")))
    if finished:
        log.info("continuing after %d finished blocks", finished)
    for index, layer in enumerate(layers):
        name = f"{prefix}.{index}"
        linears = {
            f"{name}.{n}.weight": m
            for n, m in layer.named_modules()
            if isinstance(m, nn.Linear) and f"{name}.{n}.weight" in specs
        }
        empty = torch.empty(0, 0, 0)
        inputs = streams["hidden"].data if "hidden" in streams else empty
        block = Block(
            index=index, name=name, module=layer, linears=linears, specs=specs, kwargs=kwargs[index], inputs=inputs,
            targets=streams["target"].data if "target" in streams else None, batch=batch, device=device, seed=seed,
        )  # fmt: skip
        if index < finished:
            assert store is not None
            loaded = store.load(index)
            assert loaded is not None
            block.weights, block.report = loaded
            state = {
                k.removeprefix(f"{name}."): v.dequantize() if isinstance(v, QTensor) else v for k, v in block.weights.items()
            }
            layer.load_state_dict(state, strict=False)
            yield block
            continue
        home = next(layer.parameters()).device
        layer.to(device)
        yield block
        if streams:
            _advance(block, streams, index + 1, len(layers), store, chosen.finishes)
        layer.to(home)
        give_back()  # a block's temporaries leave holes between its codes, which stay
        if store is not None:
            store.save(index, block.weights, block.report)
            for kind in kinds:
                store.hidden(index, kind).unlink(missing_ok=True)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise KaruiError(f"{file} is missing, so the calibration cannot go on; delete the folder {file.parent} to start anew.")
    return file


def _advance(
    block: Block, streams: dict[str, HiddenStates], boundary: int, blocks: int, store: Store | None, finishes: bool
) -> None:
    """Write the block's outputs as the next block's inputs; in a work folder into a new file, so that a kill spoils nothing."""
    if boundary == blocks:
        for _ in block.propagate():  # only to name a layer that gives NaN
            break
        if finishes:
            _carry_target(block, streams, boundary, store)
        return
    stream = streams["hidden"]
    after = stream if store is None else HiddenStates(tuple(stream.data.shape), store.hidden(boundary))  # type: ignore[arg-type]
    for part, out in block.propagate():
        after.data[part] = out.to("cpu", torch.float32)
    streams["hidden"] = after
    if "target" in streams:
        _carry_target(block, streams, boundary, store)


def _carry_target(block: Block, streams: dict[str, HiddenStates], boundary: int, store: Store | None) -> None:
    assert block.next_targets is not None, "a method that follows the unquantized model sets next_targets"
    if store is None:
        streams["target"].data = block.next_targets
    else:
        kept = HiddenStates(tuple(block.next_targets.shape), store.hidden(boundary, "target"))  # type: ignore[arg-type]
        kept.data.copy_(block.next_targets)
        streams["target"] = kept


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_to(v, device) for v in value)
    return value


def choose(
    layers: nn.ModuleList,
    prefix: str,
    spec: QuantSpec,
    targets: Sequence[str],
    skip: Sequence[str],
    overrides: Mapping[str, QuantSpec | str],
) -> dict[str, QuantSpec]:
    """Weight name -> grid for every targeted linear of the blocks; all patterns must match something, all groups must divide."""
    linears = {f"{prefix}.{n}": m for n, m in layers.named_modules() if isinstance(m, nn.Linear) and not left_alone(n)}

    def matching(pattern: str) -> list[str]:
        if pattern == "all-linear":
            return list(linears)
        found = [n for n in linears if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n.rpartition(".")[2], pattern)]
        if not found:
            last = sorted({n.rpartition(".")[2] for n in linears})
            raise KaruiError(
                f"pattern {pattern!r} matches no linear of the blocks; names look like {next(iter(linears))}, last parts: "
                f"{', '.join(last)}.{nearest(pattern.strip('*.').rpartition('.')[2], last)}"
            )
        return found

    chosen = {n: spec for pattern in targets for n in matching(pattern)}
    chosen = {n: spec for n in linears if n in chosen}
    for pattern, other in overrides.items():
        value = QuantSpec.parse(other) if isinstance(other, str) else other
        chosen |= {n: value for n in matching(pattern) if n in chosen}
    for pattern in skip:
        for n in matching(pattern):
            chosen.pop(n, None)
    chosen = {n: s for n, s in chosen.items() if s.format != "none"}
    if not chosen:
        raise KaruiError("nothing is left to quantize: targets, skip and overrides together choose no linear.")
    for n, s in chosen.items():
        width = linears[n].in_features
        if s.group_size is not None and width % s.group_size:
            raise KaruiError(
                f"{n}: group size {s.group_size} does not divide its input width {width}; sizes that do: "
                f"{', '.join(map(str, group_sizes(width)))}. Choose another spec or skip this layer."
            )
    return {f"{n}.weight": s for n, s in chosen.items()}


def _warn_of_zeros(model: nn.Module, names: Iterable[str], method_name: str) -> None:
    from karui.qat.gptq import pruned

    if sparse := [n for n in names if pruned(model.get_parameter(n)) is not None]:
        log.warning("%d weights are pruned, first %s, and %s fills their zeros; gptq, awq and rtn keep them", len(sparse),
                    sparse[0], method_name)


def _check_rows(
    rows: torch.Tensor | None, chosen: Method, model: nn.Module, specs: dict[str, QuantSpec], layers: nn.ModuleList, prefix: str
) -> torch.Tensor | None:
    if not chosen.calibrates:
        return None
    if rows is None:
        raise KaruiError(f"method {chosen.name} needs calibration rows (token ids [samples, length]); rtn and hqq need none.")
    width = max(m.in_features for n, m in layers.named_modules() if isinstance(m, nn.Linear) and f"{prefix}.{n}.weight" in specs)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    check_rows(rows, embedding.num_embeddings, width)
    return rows.long()


def refuse_quantized(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise on a model whose weights are codes already."""
    if config.get("quantization_config"):
        kind = config["quantization_config"].get("quant_method", "quantized")
        raise UnsupportedError(
            f"this model is already quantized ({kind}); start from the model in 16 or 32 bit that it was made of."
        )
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and (not weight.is_floating_point() or weight.dtype.itemsize < 2):
            raise UnsupportedError(
                f"{name}.weight is {weight.dtype}: this model is already quantized; start from its 16 or 32 bit original."
            )


def read_config(path: Path) -> dict[str, Any]:
    if (path / "manifest.json").is_file():
        raise UnsupportedError(f"{path} is a karui bundle, already quantized; quantize the model folder it was made of.")
    from karui.catalogue import load_config

    return load_config(path)


def load(path: Path, dtype: torch.dtype) -> nn.Module:
    """The causal LM of a folder, from safetensors only, without remote code; attention is sdpa, eager where it has no other."""
    from karui.catalogue import load_causal_lm

    model: nn.Module = load_causal_lm(path, dtype=dtype)
    return model


def source_of(path: Path) -> list[Any]:
    """What identifies a model folder: its config and the size and time of its weights."""
    files = sorted(path.glob("*.safetensors"))
    return [json.loads((path / "config.json").read_text()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]]


def _tied_head(model: nn.Module) -> str | None:
    """Name of the head's weight when it is the embedding's own tensor."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not embedding.weight:
        return None
    return next(f"{n}.weight" for n, m in model.named_modules() if m is head)
