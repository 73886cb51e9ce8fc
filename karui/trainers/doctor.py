"""`karui doctor`: is this installation able to do what the library offers, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "fail"]
NEEDED = ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "wandb", "safetensors", "gguf",
          "compressed-tensors", "pydantic")
OPTIONAL = {
    "triton": "GPU kernels (karui[triton])",
    "deepspeed": "DeepSpeed (karui[deepspeed])",
    "transformer-engine": "TransformerEngine backend (karui[te])",
    "fastapi": "`karui serve` (karui[serve])",
    "lm-eval": "lm-eval tasks (karui[eval])",
    "matplotlib": "plots (karui[plot])",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was looked at, whether it is well, what was found, and what to do when it is not."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every check, in an order that puts causes before effects; a check that breaks is itself a finding."""
    out = []
    for check in (_python, _packages, _extras, _device, _native, _memory, _cache, _tracking, _training_step):
        try:
            out.append(check())
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            out.append(Finding(name=name, state="fail", found=f"{type(error).__name__}: {error}", remedy="reinstall karui"))
    return out


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "use Python 3.11 or later"
    return Finding(name="python", state="ok" if good else "fail", found=version, remedy=remedy)


def _packages() -> Finding:
    versions = {name: _version(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(name="packages", state="fail", found=f"missing: {', '.join(missing)}", remedy="pip install karui")
    shown = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
    return Finding(name="packages", state="ok", found=", ".join(f"{n} {versions[n]}" for n in shown))


def _extras() -> Finding:
    missing = [f"{name}: {why}" for name, why in OPTIONAL.items() if _version(name) is None]
    if not missing:
        return Finding(name="extras", state="ok", found="all")
    return Finding(name="extras", state="note", found=f"not installed: {'; '.join(missing)}", remedy="only for what they name")


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding(name="device", state="ok", found=", ".join(
            f"{c.name} sm_{c.major}{c.minor} {c.total_memory / 2**30:.0f} GiB" for c in cards))
    if torch.version.cuda is not None:
        from karui.kernels.triton_support.driver import no_gpu

        found, _, remedy = no_gpu().partition("; ")
        return Finding(name="device", state="note", found=found, remedy=remedy)
    return Finding(name="device", state="ok", found=f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads")


def _native() -> Finding:
    from karui.kernels.native import build, library

    if reason := library.unavailable():
        return Finding(name="C++ kernels", state="fail", found=reason,
                       remedy="install g++ (C++17); without it the engine runs on torch, several times slower")
    return Finding(name="C++ kernels", state="ok", found=f"{build.chosen_isa()}, compiled by {build.compiler()}")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    low = memory.available < 4e9
    return Finding(name="memory", state="note" if low else "ok",
                   found=f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
                   remedy="`karui train RECIPE --dry-run` says what a run needs" if low else "")


def _cache() -> Finding:
    from karui.catalogue import entries
    from karui.catalogue.store import cache_root

    root = cache_root()
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return Finding(name="cache", state="fail", found=f"{root} is not writable", remedy="set KARUI_CACHE to a folder that is")
    free = shutil.disk_usage(existing).free
    here = [row["name"] for row in entries() if row["cached"]]
    found = f"{_home(root)}, {free / 1e9:.0f} GB free, models: {', '.join(here) or 'none yet'}"
    low = free < 5e9
    return Finding(name="cache", state="note" if low else "ok", found=found, remedy="make room" if low else "")


def _tracking() -> Finding:
    from karui.trainers.tracking import logged_in

    if logged_in():
        return Finding(name="W&B", state="ok", found="logged in")
    return Finding(name="W&B", state="note", found="no login: runs are recorded offline", remedy="`wandb login` to send them")


def _training_step() -> Finding:
    """A real step of LoRA on a tiny random model, through the packed path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                             num_key_value_heads=1, max_position_embeddings=64)
        config._attn_implementation = ATTENTION
        model = attach(LlamaForCausalLM(config), LoraStep(method="qlora", rank=2)).model
        install_lean_ops(model)
        tokens = torch.randint(0, 64, (24,))
        targets = torch.cat([tokens[1:], torch.tensor([IGNORE])])
        loss = LossSum(model, 16)(tokens, torch.arange(24), torch.tensor([0, 24]), targets)
        loss.backward()
    norm = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    good = bool(torch.isfinite(loss)) and norm > 0
    flows = "flows" if good else "does not flow"
    return Finding(name="training step", state="ok" if good else "fail",
                   found=f"QLoRA on a tiny model: loss {float(loss.detach()) / 23:.2f}, gradient {flows}",
                   remedy="" if good else "reinstall karui with the versions of constraints.txt")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _home(path: Path) -> str:
    home = str(Path.home())
    return str(path).replace(home, "~", 1) if str(path).startswith(home) else str(path)


def report(write: Callable[[str], None]) -> int:
    """Print the findings; 1 when something must be mended, else 0."""
    marks = {"ok": "ok  ", "note": "note", "fail": "FAIL"}
    findings = examine()
    for f in findings:
        write(f"{marks[f.state]}  {f.name:<14} {f.found}" + (f"  ->  {f.remedy}" if f.remedy else ""))
    return int(any(f.state == "fail" for f in findings))
