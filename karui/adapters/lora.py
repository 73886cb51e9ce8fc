"""LoRA (arXiv 2106.09685), rsLoRA (2312.03732) and QLoRA (2305.14314): put adapters on a model, save them, load them.

Layers and files are peft's: a folder written here loads with `PeftModel.from_pretrained`, and one written by peft loads here.
Beside them lies `karui_adapter.json` with the fingerprint of the base the adapter was trained on; an adapter for another base
is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.adapters.quantized_linear import QuantizedLinear, quantize_linears
from karui.configs.errors import CorruptError, KaruiError, nearest
from karui.configs.quantspec import QuantSpec
from karui.configs.steps import LoraStep

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)
SIDE_FILE = "karui_adapter.json"


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What `attach` did.

    Attributes:
        model: the model with adapters, its base frozen.
        targets: full names of the layers that got an adapter.
        quantized: full names of the layers whose base was quantized.
        base: fingerprint of the base before anything was done to it.
    """

    model: PeftModel
    targets: tuple[str, ...]
    quantized: tuple[str, ...]
    base: str


def attach(model: nn.Module, step: LoraStep) -> Attached:
    """Freeze `model`, quantize its linears when the step says so, and add adapters (A Kaiming from torch's RNG, B zero).

    Raises:
        KaruiError: targets that match nothing, a rank above a target's dimensions, a tied head as target, a weight that does
            not fit the grid.
    """
    from peft import LoraConfig, get_peft_model

    from karui.adapters.fused import custom_modules

    base = fingerprint(model)
    targets = resolve_targets(model, step.targets)
    check_rank(model, targets, step.rank)
    quantized: tuple[str, ...] = ()
    if step.base.format != "none":
        quantized = tuple(quantize_linears(model, step.base, skip=_head_names(model)))
    config = LoraConfig(
        r=step.rank,
        lora_alpha=int(step.alpha) if step.alpha == int(step.alpha) else step.alpha,  # type: ignore[arg-type]
        lora_dropout=step.dropout,
        use_rslora=step.rslora,
        target_modules=_shortest(model, targets),
        task_type="CAUSAL_LM",
        bias="none",
    )
    config._register_custom_module(custom_modules())
    with _quiet():
        peft_model = get_peft_model(model, config)
    return Attached(model=peft_model, targets=tuple(targets), quantized=quantized, base=base)


def resolve_targets(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Full names of the linears that `targets` means: all but the output head, or those whose name ends in a given one."""
    linears = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, QuantizedLinear))]
    head = _head_names(model)
    if targets == "all-linear":
        found = [n for n in linears if n not in head]
        if not found:
            raise KaruiError(f"targets all-linear: {type(model).__name__} has no linear layer besides its output head.")
        return found
    wanted = (targets,) if isinstance(targets, str) else targets
    chosen: list[str] = []
    for target in wanted:
        matches = [n for n in linears if n == target or n.endswith("." + target)]
        if not matches:
            leaves = sorted({n.rpartition(".")[2] for n in linears})
            raise KaruiError(
                f"adapter target {target!r} matches no linear layer; this model's: {', '.join(leaves)}.{nearest(target, leaves)}"
            )
        chosen += matches
    if tied := sorted(set(chosen) & head) if _is_tied(model) else []:
        raise KaruiError(
            f"adapter target {tied[0]!r} shares its weight with the embedding; a merged adapter would change both. "
            f"Leave it out of targets."
        )
    return [n for n in linears if n in set(chosen)]


def check_rank(model: nn.Module, targets: list[str], rank: int) -> None:
    """Raise `KaruiError` when a target's smaller dimension is below `rank`."""
    for name in targets:
        module: Any = model.get_submodule(name)
        limit = min(module.in_features, module.out_features)
        if rank > limit:
            raise KaruiError(
                f"rank {rank} is above the dimensions of {name} ({module.out_features} x {module.in_features}); "
                f"a low-rank update has at most rank {limit}. Lower prepare's rank or leave that layer out of targets."
            )


def fingerprint(model: nn.Module) -> str:
    """16 hex digits that tell one base from another: names, shapes and 256 evenly spaced values (as fp32) of every parameter."""
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        flat = value.detach().reshape(-1)
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
    """Write adapter_model.safetensors, adapter_config.json and the side file into an existing folder; the same bytes every time.

    Args:
        base: fingerprint of the base as it was loaded.
        base_name: what the base is called, for people and for peft.
        base_spec: the grid the base was quantized to, if any.
    """
    with _quiet():
        model.peft_config["default"].base_model_name_or_path = base_name
        model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's model card template, empty of facts
    config = folder / "adapter_config.json"
    values = _read_json(config)
    if isinstance(values.get("target_modules"), list):  # peft writes a set, in any order
        values["target_modules"].sort()
    config.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")
    side = {"base": base, "base_name": base_name, "base_spec": str(base_spec) if base_spec else "none"}
    (folder / SIDE_FILE).write_text(json.dumps(side, indent=1) + "\n", encoding="utf-8")


def replace_folder(scratch: Path, folder: Path) -> None:
    """Put `scratch` where `folder` is or will be; the old one is moved aside first and removed last."""
    import shutil

    old = folder.with_name(f".{folder.name}.old{os.getpid()}")
    if folder.exists():
        os.replace(folder, old)
    os.replace(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_adapter(model: nn.Module, folder: str | Path, *, trainable: bool = False, base: str | None = None) -> PeftModel:
    """Put a saved adapter (peft's or karui's) on a base.

    Args:
        model: the base, not yet wrapped; its linears may be `QuantizedLinear`.
        folder: holds adapter_config.json and adapter_model.safetensors.
        trainable: whether A and B get gradients.
        base: the base's fingerprint when it was quantized meanwhile; default: computed from `model`.

    Raises:
        KaruiError: files are missing, or the adapter belongs to another base.
        CorruptError: a file cannot be read, or tensors are missing or do not fit.
    """
    from peft import LoraConfig, PeftModel

    from karui.adapters.fused import custom_modules

    path = Path(folder)
    values = adapter_values(path)
    side = _read_json(path / SIDE_FILE) if (path / SIDE_FILE).is_file() else {}
    if side.get("base"):
        own = base or fingerprint(model)
        if side["base"] != own:
            raise KaruiError(
                f"adapter {path} was trained on another base ({side.get('base_name')}, fingerprint {side['base']}); "
                f"this model's fingerprint is {own}. Load it on the model it belongs to."
            )
    config = LoraConfig.from_pretrained(str(path))
    config.inference_mode = not trainable
    config._register_custom_module(custom_modules())
    with _quiet():
        peft_model = PeftModel(model, config)
    load_values(peft_model, values, str(path))
    peft_model.eval()
    return peft_model


def adapter_values(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter by peft's names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise KaruiError(f"{folder} is not an adapter: {name} is missing.")
    _read_json(folder / "adapter_config.json")
    try:
        return load_file(str(folder / "adapter_model.safetensors"))
    except SafetensorError as error:
        path = folder / "adapter_model.safetensors"
        raise CorruptError(f"{path} cannot be read: {error}. It was cut short or damaged.") from error


def load_values(model: PeftModel, values: dict[str, torch.Tensor], source: str) -> None:
    """Copy saved adapter tensors into a model's adapter; every tensor must be met by one of its own name and shape."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    if odd := sorted(set(own) ^ set(values)):
        raise CorruptError(f"{source}: {len(odd)} tensors are missing or do not belong to this model, first {odd[0]!r}.")
    for name, value in values.items():
        if own[name].shape != value.shape:
            raise CorruptError(f"{source}: {name} has shape {tuple(value.shape)}, the model's is {tuple(own[name].shape)}.")
    with _quiet():
        set_peft_model_state_dict(model, values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is not readable JSON: {error}.") from error


def _head_names(model: nn.Module) -> set[str]:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return {n for n, m in model.named_modules() if m is head}


def _is_tied(model: nn.Module) -> bool:
    get_in, get_out = getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None)
    if not callable(get_in) or not callable(get_out) or get_in() is None or get_out() is None:
        return False
    return get_in().weight is get_out().weight


def _shortest(model: nn.Module, targets: list[str]) -> list[str]:
    """Leaf names when they mean exactly `targets` (the form other tools write), else the full names."""
    leaves = sorted({n.rpartition(".")[2] for n in targets})
    linears = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, QuantizedLinear))]
    meant = {n for n in linears if n.rpartition(".")[2] in leaves}
    return leaves if meant == set(targets) else list(targets)


@contextmanager
def _quiet() -> Iterator[None]:
    """peft warns of layer types it does not know; ours are registered on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        warnings.filterwarnings("ignore", message="Could not find a config file")
        yield
