"""Adapter folders: written here, read by peft, and the other way round.

    adapter_config.json, adapter_model.safetensors     peft's
    karui_adapter.json                                 fingerprint and name of the base, its grid, how the adapter started
    karui_residual.safetensors                         MODULE.u, MODULE.v: the base is grid(W - s U V); only on a quantized base

On an unquantized base no further file is needed: B A over the base W - s U V is [B, -U] [A; V] over W, an ordinary adapter of
twice the rank, and that is what is written, so that peft and others load it on the original model.

An adapter for another base is refused by its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.lora.residual import residual
from karui.kernels.quantize import quantize

if TYPE_CHECKING:
    from peft import PeftModel

SIDE_FILE, RESIDUAL_FILE = "karui_adapter.json", "karui_residual.safetensors"
_CONFIG, _VALUES = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
Pair = tuple[torch.Tensor, torch.Tensor]
Weights = Callable[[str], torch.Tensor]
WeightChange = Callable[[str, torch.Tensor], torch.Tensor]


def fingerprint(model: nn.Module, read: Callable[[nn.Module, str], torch.Tensor] | None = None) -> str:
    """16 hex digits that tell one base from another: names, shapes and 256 evenly spaced values (as fp32) of every parameter.

    Args:
        read: (model, name) -> the parameter, where the model holds none.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        flat = (value if read is None else read(model, name)).detach().reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(256, flat.numel()), dtype=torch.float64).round().long().to(flat.device)
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(flat[at].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_adapter(model: PeftModel, folder: Path, *, base: str, base_name: str, base_spec: QuantSpec | None = None) -> None:
    """Write an adapter folder, which appears whole or not at all; arguments as in `write_adapter`."""
    scratch = folder.with_name(f".{folder.name}.tmp{os.getpid()}")
    scratch.mkdir(parents=True)
    write_adapter(model, scratch, base=base, base_name=base_name, base_spec=base_spec)
    replace_folder(scratch, folder)


def write_adapter(model: PeftModel, folder: Path, *, base: str, base_name: str, base_spec: QuantSpec | None = None) -> None:
    """Write an adapter's files into an existing folder; the same bytes every time.

    Args:
        base: fingerprint of the base as it was loaded.
        base_name: what the base is called, for people and for peft.
        base_spec: the grid the base was quantized to, if any.
    """
    from safetensors.torch import save_file

    with quiet():
        model.peft_config["default"].base_model_name_or_path = base_name
        model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's model card template, empty of facts
    config = read_json(folder / _CONFIG)
    pairs = _pairs(model)
    side: dict[str, Any] = {"base": base, "base_name": base_name, "base_spec": str(base_spec) if base_spec else "none"}
    if pairs and base_spec is not None and base_spec.format != "none":
        side["residual"] = RESIDUAL_FILE
        tensors = {f"{name}.{part}": t.detach().cpu().contiguous() for name, pair in pairs.items() for part, t in zip("uv", pair)}
        save_file(tensors, str(folder / RESIDUAL_FILE))
    elif pairs:
        side["residual"] = "the second half of the rank"
        save_file(_widened(adapter_values(folder), pairs), str(folder / _VALUES), metadata={"format": "pt"})
        scaling = next(iter(_layers(model).values())).scaling["default"]
        alpha = scaling * 2 * config["r"]
        config |= {"r": 2 * config["r"], "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "use_rslora": False}
    for key in ("target_modules", "modules_to_save", "feedforward_modules"):
        if isinstance(config.get(key), list):  # peft writes sets, in any order
            config[key].sort()
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    (folder / SIDE_FILE).write_text(json.dumps(side, indent=1) + "\n", encoding="utf-8")


def replace_folder(scratch: Path, folder: Path) -> None:
    """Put `scratch` where `folder` is or will be; the old one is moved aside first and removed last."""
    old = folder.with_name(f".{folder.name}.old{os.getpid()}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_adapter(model: nn.Module, folder: str | Path, *, trainable: bool = False, base: str | None = None) -> PeftModel:
    """Put a saved adapter (peft's or karui's) on a base.

    Args:
        model: the base, not yet wrapped; its linears may be `QuantizedLinear`. Where the adapter changed a quantized base
            (LoftQ, PiSSA), the model must be the original one, and its linears are put on that base here.
        folder: holds adapter_config.json and adapter_model.safetensors.
        trainable: whether the adapter gets gradients.
        base: the base's fingerprint when it was quantized meanwhile; default: computed from `model`.

    Raises:
        KaruiError: files are missing, or the adapter belongs to another base.
        CorruptError: a file cannot be read, or tensors are missing or do not fit.
    """
    from peft import PeftConfig, PeftModel

    from karui.adapters import dora, fused

    path = Path(folder)
    values = adapter_values(path)
    side = read_side(path)
    if side.get("base"):
        own = base or fingerprint(model)
        if side["base"] != own:
            raise KaruiError(
                f"adapter {path} was trained on another base ({side.get('base_name')}, fingerprint {side['base']}); "
                f"this model's fingerprint is {own}. Load it on the model it belongs to."
            )
    config: Any = PeftConfig.from_pretrained(str(path))
    config.inference_mode = not trainable
    residuals = read_residuals(path)
    if residuals:
        _rebuild_base(model, residuals, QuantSpec.parse(side["base_spec"]), path)
    if config.peft_type == "LORA":
        config.init_lora_weights = True  # the values are loaded below; PiSSA and the like would change the base
        config._register_custom_module((dora if config.use_dora else fused).custom_modules())
    with quiet():
        peft_model = PeftModel(model, config)
    for name, pair in residuals.items():
        keep_residual(peft_model.get_base_model().get_submodule(name), pair)
    load_values(peft_model, values, str(path))
    if config.is_prompt_learning:
        from karui.adapters.soft_prompt import install

        install(peft_model)
    peft_model.eval()
    return peft_model


def adapter_values(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter by peft's names."""
    for name in (_CONFIG, _VALUES):
        if not (folder / name).is_file():
            raise KaruiError(f"{folder} is not an adapter: {name} is missing.")
    read_json(folder / _CONFIG)
    return _read_tensors(folder / _VALUES)


def read_residuals(folder: Path) -> dict[str, Pair]:
    """(U, V) by layer name where an adapter changed its quantized base, else nothing."""
    if read_side(folder).get("residual") != RESIDUAL_FILE:
        return {}
    if not (folder / RESIDUAL_FILE).is_file():
        raise KaruiError(f"{folder} is not a whole adapter: {RESIDUAL_FILE} is missing, without which its base cannot be made.")
    tensors = _read_tensors(folder / RESIDUAL_FILE)
    names = sorted({n.rpartition(".")[0] for n in tensors})
    try:
        return {name: (tensors[f"{name}.u"], tensors[f"{name}.v"]) for name in names}
    except KeyError as error:
        raise CorruptError(f"{folder / RESIDUAL_FILE}: {error} is missing.") from error


def taken_out(folder: Path) -> WeightChange:
    """(layer name, original weight) -> the weight that the adapter's base is made of; the same one where nothing was changed."""
    pairs = read_residuals(folder)
    config = read_json(folder / _CONFIG)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in pairs:
            return weight
        rank = pairs[name][1].shape[0]
        return residual(weight.float(), *pairs[name], config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank))

    return change


def load_values(model: PeftModel, values: dict[str, torch.Tensor], source: str) -> None:
    """Copy saved adapter tensors into a model's adapter; every tensor must be met by one of its own name and shape."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    if odd := sorted(set(own) ^ set(values)):
        raise CorruptError(f"{source}: {len(odd)} tensors are missing or do not belong to this model, first {odd[0]!r}.")
    for name, value in values.items():
        if own[name].shape != value.shape:
            raise CorruptError(f"{source}: {name} has shape {tuple(value.shape)}, the model's is {tuple(own[name].shape)}.")
    with quiet():
        set_peft_model_state_dict(model, values)


def resume_values(model: PeftModel, folder: Path, weights: Weights) -> None:
    """Put a checkpoint of the same recipe back into a prepared model, residual bases included.

    Args:
        weights: the original weight [out, in] of a layer by its full name; asked for only where this machine's own start came
            out differently in its last digits, so that the base has to be made anew from the checkpoint's factors.
    """
    values, pairs = adapter_values(folder), _pairs(model)
    stored = read_residuals(folder)
    if pairs and not stored:
        values, stored = _narrowed(values, pairs, str(folder))
    if stored.keys() != pairs.keys():
        raise CorruptError(f"{folder}: its base was changed in {len(stored)} layers, this run's in {len(pairs)}.")
    for name, pair in stored.items():
        if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(pair, pairs[name])):
            layer: Any = model.get_base_model().get_submodule(name)
            _set_base(layer, residual(weights(name).float(), *pair, layer.scaling["default"]), name)
            keep_residual(layer, pair)
    load_values(model, values, str(folder))


def residual_parts(adapter: str) -> tuple[str, str]:
    """Names of the buffers that keep U and V beside a layer's factors."""
    return f"residual_u_{adapter}", f"residual_v_{adapter}"


def keep_residual(layer: Any, pair: Pair, adapter: str = "default") -> None:
    """Keep U and V beside a layer's factors: neither trained nor part of the state dict."""
    for part, value in zip(residual_parts(adapter), pair):
        layer.register_buffer(part, value.to(layer.lora_A[adapter].weight.device), persistent=False)


def read_side(folder: Path) -> dict[str, Any]:
    """karui_adapter.json, or nothing for an adapter of another tool."""
    return read_json(folder / SIDE_FILE) if (folder / SIDE_FILE).is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is not readable JSON: {error}.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """peft warns of layer types it does not know; ours are registered on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        warnings.filterwarnings("ignore", message="Could not find a config file")
        yield


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise CorruptError(f"{path} cannot be read: {error}. It was cut short or damaged.") from error


def _layers(model: PeftModel) -> dict[str, Any]:
    """The layers whose base lost something, by full name in the base model."""
    found: dict[str, Any] = {n: m for n, m in model.get_base_model().named_modules() if hasattr(m, residual_parts("default")[0])}
    return found


def _pairs(model: PeftModel) -> dict[str, Pair]:
    u, v = residual_parts("default")
    return {n: (getattr(m, u), getattr(m, v)) for n, m in _layers(model).items()}


def _widened(values: dict[str, torch.Tensor], pairs: dict[str, Pair]) -> dict[str, torch.Tensor]:
    """[A; V] and [B, -U] in place of A and B."""
    out = dict(values)
    for name, (u, v) in pairs.items():
        a, b = _keys(name)
        out[a] = torch.cat([values[a], v.cpu().to(values[a].dtype)], 0)
        out[b] = torch.cat([values[b], -u.cpu().to(values[b].dtype)], 1)
    return out


def _narrowed(
    values: dict[str, torch.Tensor], pairs: dict[str, Pair], source: str
) -> tuple[dict[str, torch.Tensor], dict[str, Pair]]:
    """The inverse of `_widened`."""
    out, stored = dict(values), {}
    for name, (u, _) in pairs.items():
        a, b = _keys(name)
        fits = a in values and b in values and values[b].shape[1] == values[a].shape[0] == 2 * u.shape[1]
        if not fits:
            raise CorruptError(f"{source}: the adapter of {name} does not start with a changed base of rank {u.shape[1]}.")
        (out[a], v), (out[b], minus_u) = values[a].chunk(2, 0), values[b].chunk(2, 1)
        stored[name] = (-minus_u, v)
    return out, stored


def _keys(name: str) -> tuple[str, str]:
    return f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"


@torch.no_grad()
def _rebuild_base(model: nn.Module, residuals: dict[str, Pair], spec: QuantSpec, source: Path) -> None:
    """Put every linear but the head on the grid, after taking out what the adapter's start took out."""
    from karui.adapters.targets import head_names

    head, change = head_names(model), taken_out(source)
    for name in residuals:
        if type(model.get_submodule(name)) is not nn.Linear:
            raise KaruiError(f"{source} changed its base, which is made from the original weights; {name} is packed already. "
                             "Load it on the model as it was before quantization.")
    for name, module in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n not in head]:
        weight = change(name, module.weight)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, QuantizedLinear(quantize(weight, spec, name=name), module.bias))


@torch.no_grad()
def _set_base(layer: Any, weight: torch.Tensor, name: str) -> None:
    old = layer.base_layer
    if isinstance(old, QuantizedLinear):
        layer.base_layer = QuantizedLinear(quantize(weight, old.spec, name=name), old.bias).to(old.qweight.device)
    else:
        old.weight.copy_(weight)
