"""A transformers model as a teacher: frozen, on packed rows, in its dtype, on a grid, or read from its file layer by layer."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karui.catalogue.logits import logit_softcap, scaled
from karui.configs.errors import UnsupportedError
from karui.configs.objectives import TeacherSection
from karui.configs.recipe import ModelSection, Recipe
from karui.distill import capture
from karui.distill.teacher_rows import DenseRows
from karui.trainers.model import base_model, documents_of


class Teacher:
    """Not an `nn.Module`, so that it is neither trained, nor wrapped, nor saved with the student.

    Attributes:
        model: the frozen model, in eval mode.
        folder: its resolved folder.
        head: [V, H] output weight in float32.
        softcap: of its logits, None without one.
    """

    def __init__(self, section: TeacherSection, recipe: Recipe) -> None:
        from karui.trainers.model import install_lean_ops, load_model, weights_folder

        name = section.name or recipe.model.name
        self.section, self.name = section, name
        self.folder = weights_folder(name)
        self.model: nn.Module = load_offloaded(name, section.dtype) if section.offload else load_model(
            ModelSection(name=name, dtype=section.dtype))
        if section.base.format != "none":
            if section.offload:
                raise UnsupportedError("a teacher is either quantized (teacher.base) or offloaded (teacher.offload), not both.")
            from karui.adapters.quantized_linear import quantize_linears
            from karui.adapters.targets import head_names

            quantize_linears(self.model, section.base, head_names(self.model))
        self.model.requires_grad_(False).eval()
        if not section.offload:
            install_lean_ops(self.model)
        self.head = head_weight(self.model, self.folder).float()
        self.softcap = logit_softcap(base_model(self.model).config)

    def to(self, device: torch.device) -> Teacher:
        """In place; a no-op where it already is."""
        if self.head.device != device:
            self.head = self.head.to(device)
            if not self.section.offload:  # read from its file module by module, it runs on the CPU
                self.model.to(device)
        return self

    @property
    def layers(self) -> nn.ModuleList:
        return base_model(self.model).get_decoder().layers  # type: ignore[operator]

    @torch.no_grad()
    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, depths: Iterable[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Last hidden states [T, H] in float32 of a packed row, times the logits' scale, and residual streams by depth."""
        body = base_model(self.model).get_decoder()  # type: ignore[operator]
        home = tokens.device
        if self.section.offload:
            tokens, positions, cu_seqlens = tokens.cpu(), positions.cpu(), cu_seqlens.cpu()
        with capture.depths(self.layers, depths) as found:
            out = body(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False,
                       **documents_of(body, cu_seqlens))
        last = out.last_hidden_state.squeeze(0).to(home).float()
        return scaled(last, body.config), {d: x.to(home).float() for d, x in found.items()}

    def rows(self, hidden: torch.Tensor) -> DenseRows:
        """`hidden` [N, H] as teacher rows over the whole vocabulary."""
        return self.over(hidden, self.head)

    def over(self, hidden: torch.Tensor, head: torch.Tensor) -> DenseRows:
        """The same over some rows of the head's weight."""
        return DenseRows(hidden, head, self.softcap)

    def identity(self) -> dict[str, Any]:
        """What its logits depend on, for the cache."""
        from karui.adapters.files import fingerprint

        own = fingerprint(self.model, offloaded if self.section.offload else None)
        return {"teacher": own, "dtype": self.section.dtype, "base": str(self.section.base)}


def head_weight(model: nn.Module, folder: Path) -> torch.Tensor:
    """The output head's weight [V, H]; from the file when the model keeps it there."""
    weight: torch.Tensor = base_model(model).get_output_embeddings().weight  # type: ignore[operator]
    if weight.device.type != "meta":
        return weight.detach()
    from karui.inference.bundle import open_model

    opened = open_model(folder)
    names = set(opened.names)
    return opened.weight("lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight")  # type: ignore[return-value]


def load_offloaded(name: str, dtype: str) -> nn.Module:
    """A model whose weights stay in their safetensors file and are read as each module runs (accelerate's disk offload)."""
    from transformers.utils import logging as transformers_logging

    from karui.catalogue import load_causal_lm, resolve
    from karui.trainers.model import ATTENTION, check_supported, register_attention
    from karui.trainers.sparse import install_sparse_attention

    register_attention()
    transformers_logging.disable_progress_bar()
    scratch = tempfile.mkdtemp(prefix="karui-offload-")  # what no safetensors file holds as it is
    model: nn.Module = load_causal_lm(resolve(name), dtype=getattr(torch, dtype), attn_implementation=ATTENTION,
                                      device_map={"": "disk"}, offload_folder=scratch)
    weakref.finalize(model, shutil.rmtree, scratch, ignore_errors=True)
    check_supported(model)
    install_sparse_attention(model)
    return model


def offloaded(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter of a model of `load_offloaded`, read from its file."""
    from accelerate.utils import align_module_device

    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    with align_module_device(module, "cpu"):
        value: torch.Tensor = getattr(module, leaf).detach()
    return value


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer's vocabulary and of its chat template."""
    from karui.inference.speculative.target import vocabulary_digest

    template = str(getattr(tokenizer, "chat_template", None) or "").encode()
    return {"tokenizer": vocabulary_digest(tokenizer)[:16], "template": hashlib.sha256(template).hexdigest()[:16]}


def tokenizer_of(folder: Path) -> Any:
    """The folder's tokenizer, or None when it holds none."""
    from karui.catalogue import load_tokenizer

    try:
        return load_tokenizer(folder)
    except (OSError, ValueError):
        return None
