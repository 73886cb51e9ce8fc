"""From a `SpeculationConfig` to one proposer per request; heads and draft models are loaded once and shared."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.bundle.reader import Opened
from karui.inference.models.config import ModelConfig
from karui.inference.speculative.base import Proposer
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.draft_model import Drafter, DraftModelProposer
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config, Eagle3Proposer, NativeEagle3Proposer, pack_layer
from karui.inference.speculative.lookahead import LookaheadProposer
from karui.inference.speculative.medusa import (
    MedusaHeads,
    MedusaProposer,
    NativeMedusaProposer,
    likeliest,
    pack_heads,
)
from karui.inference.speculative.ngram import NgramProposer
from karui.inference.speculative.target import TargetIdentity

logger = logging.getLogger(__name__)
MEDUSA_FILE, EAGLE3_FILE = "medusa.safetensors", "eagle3.safetensors"
FILES = {"medusa": MEDUSA_FILE, "eagle3": EAGLE3_FILE}
Choices = tuple[tuple[int, ...], ...]
"""A fixed tree in Medusa's spelling, see `tree_of_choices`."""


class Speculator:
    """Makes proposers: `Speculator(config, ...).new()` per request.

    Args:
        config: what to speculate with.
        model: the target's configuration.
        heads: folder that holds `medusa.safetensors` or `eagle3.safetensors` (the bundle), or the loaded module.
        embed: the target's embedding lookup, ids [n] -> [n, H] (eagle3).
        head: the target's head [V, H] (medusa heads that share it).
        embedding, packed_head: the target's embedding and head as the native kernels have packed them, as they are now (eagle3;
            medusa): drafts are then made there.
        drafter: the draft model, already opened (draft).
    Raises:
        KaruiError: a method's ingredient is missing or does not fit the target.
    """

    def __init__(self, config: SpeculationConfig, model: ModelConfig, *, heads: Path | MedusaHeads | Eagle3 | None = None,
                 embed: Callable[[torch.Tensor], torch.Tensor] | None = None, head: Callable[[], torch.Tensor] | None = None,
                 embedding: Callable[[], Any] | None = None, packed_head: Callable[[], Any] | None = None,
                 drafter: Drafter | None = None) -> None:
        self.config, self.model, self.embed, self.embedding, self.drafter = config, model, embed, embedding, drafter
        self.packed_head = packed_head
        self.medusa: MedusaHeads | None = None
        self.eagle3: Eagle3 | None = None
        self.choices: Choices | None = None
        if config.method == "medusa":
            if isinstance(heads, MedusaHeads):
                self.medusa = heads
            else:
                self.medusa, self.choices = load_medusa(_folder(heads, "medusa"))
            given = (self.medusa.hidden_size, self.medusa.vocab_size)
            if given != (model.hidden_size, model.vocab_size):
                raise KaruiError(f"medusa heads have (hidden, vocabulary) sizes {given}, "
                                 f"the model {model.hidden_size, model.vocab_size}.")
            if self.medusa.shared and self.medusa.projection is None:
                if head is None:
                    raise KaruiError("medusa: these heads share the target's head, which was not given.")
                self.medusa.bind(head())
            if packed_head is not None and self.choices is None:
                self.packed_heads = pack_heads(self.medusa)
        elif config.method == "eagle3":
            self.eagle3 = heads if isinstance(heads, Eagle3) else load_eagle3(_folder(heads, "eagle3"))
            c = self.eagle3.config
            if (c.vocab_size, c.hidden_size) != (model.vocab_size, model.hidden_size) or max(c.aux_layers) >= model.num_layers:
                raise KaruiError(f"eagle3 head: made for hidden {c.hidden_size}, {c.vocab_size} tokens, layers {c.aux_layers}, "
                                 f"but the model has {model.hidden_size}, {model.vocab_size}, {model.num_layers} layers.")
            if embedding is not None:
                self.layer = pack_layer(self.eagle3)
            elif embed is None:
                raise KaruiError("eagle3 needs the target's embedding lookup.")
        elif config.method == "draft" and drafter is None:
            raise KaruiError(f"speculation {config}: the draft model {config.path!r} was not loaded.")
        self.new().reset()      # a bad size is an error now, not at the first request

    def new(self) -> Proposer:
        """A proposer for one request."""
        c = self.config
        k = c.length(native=self.packed_head is not None)
        if c.method == "ngram":
            return NgramProposer(k, c.n_max, c.n_min)
        if c.method == "lookahead":
            return LookaheadProposer(*c.lookahead)
        if c.method == "draft":
            assert self.drafter is not None
            return DraftModelProposer(self.drafter, k, self.model.vocab_size)
        if c.method == "medusa":
            assert self.medusa is not None
            if self.choices is not None:
                fixed = [choice for choice in self.choices if len(choice) <= len(self.medusa.heads)]
                return MedusaProposer(self.medusa, likeliest(fixed, k))
            shape: dict[str, Any] = {"nodes": k, "width": c.width or min(k, 8), "least": c.least or 0.0}
            if self.packed_head is not None:
                return NativeMedusaProposer(self.medusa, self.packed_heads, self.packed_head, **shape)
            return MedusaProposer(self.medusa, **shape)
        if c.method == "eagle3":
            assert self.eagle3 is not None
            if self.embedding is not None:
                least = 0.25 if c.least is None else c.least
                return NativeEagle3Proposer(self.eagle3, self.layer, self.embedding, k, c.width or 2, c.nodes or 3, least)
            assert self.embed is not None
            return Eagle3Proposer(self.eagle3, self.embed, k, c.width or 4, c.nodes or 24, least=c.least or 0.0)
        raise KaruiError("speculation is off (method none); there is no proposer to make.")


def _folder(heads: object, method: str) -> Path:
    if not isinstance(heads, Path):
        raise KaruiError(f"speculation {method}: the model holds no {method} heads; give a bundle that does.")
    return heads


def save_medusa(heads: MedusaHeads, folder: Path, choices: Choices | None = None, target: TargetIdentity | None = None) -> None:
    """Write `medusa.safetensors`; in its metadata the target's vocabulary, `choices` (a fixed tree; None: the heads'
    probabilities choose) and `target` (the model the heads are for); atomically."""
    metadata = {"vocab_size": str(heads.vocab_size)} | ({} if choices is None else {"choices": json.dumps(choices)})
    _save(folder / MEDUSA_FILE, heads.tensors(), metadata, target)


def load_medusa(folder: Path) -> tuple[MedusaHeads, Choices | None]:
    """Heads and topology. Raises `KaruiError` without the file, `CorruptError` when it is damaged."""
    tensors, metadata = _load(folder / MEDUSA_FILE, "medusa")
    try:
        listed = json.loads(metadata.get("choices", "null"))
        choices = None if not listed else tuple(tuple(int(r) for r in c) for c in listed)
        vocab = int(metadata["vocab_size"]) if "vocab_size" in metadata else None
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{folder / MEDUSA_FILE}: its metadata (tree topology, vocabulary) cannot be read: {error}") from error
    return MedusaHeads.from_tensors(tensors, vocab), choices


def save_eagle3(model: Eagle3, folder: Path, target: TargetIdentity | None = None) -> None:
    """Write `eagle3.safetensors`, configuration and `target` (the model the layer is for) in its metadata; atomically."""
    _save(folder / EAGLE3_FILE, model.tensors(), {"config": json.dumps(asdict(model.config))}, target)


def load_eagle3(folder: Path) -> Eagle3:
    """Raises `KaruiError` without the file, `CorruptError` when it is damaged."""
    tensors, metadata = _load(folder / EAGLE3_FILE, "eagle3")
    try:
        values = json.loads(metadata["config"])
        config = Eagle3Config(**{**values, "aux_layers": tuple(values["aux_layers"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{folder / EAGLE3_FILE}: its configuration cannot be read: {error}") from error
    return Eagle3.from_tensors(config, tensors)


def draft_target(folder: Path, method: str) -> TargetIdentity | None:
    """The model that the folder's draft says it is for; None when it does not say. Errors as in `load_medusa`."""
    _, metadata = _load(folder / FILES[method], method, weights=False)
    if "target" not in metadata:
        return None
    try:
        return TargetIdentity.loads(metadata["target"])
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{folder / FILES[method]}: which model it was made for cannot be read: {error}") from error


def check_draft(folder: Path, method: str, opened: Opened, tokenizer: Any) -> None:
    """Refuse a draft that was made for another model than `opened`; one that does not say is let through with a warning.

    Raises:
        KaruiError: weights or vocabulary are not those it was made for, or there is no draft.
        CorruptError: its file or its mark is damaged.
    """
    made_for = draft_target(folder, method)
    if made_for is None:
        logger.warning("%s does not say which model it was made for; for another than %s its drafts would be wrong",
                       folder / FILES[method], opened.path)
    elif difference := made_for.difference(TargetIdentity.of(opened, tokenizer)):
        raise KaruiError(f"{folder / FILES[method]} was made for another model: the {difference} of {opened.path} is not what it "
                         f"was trained on. Train a draft for this model; to use this one all the same (a fine-tuned model, say), "
                         f"write {method}:K,any-target, or SpeculationConfig(any_target=True).")


def copy_draft(method: str, source: Path, folder: Path, target: TargetIdentity | None) -> None:
    """Copy a draft's file from folder to folder, marked as made for `target` (None: without a mark)."""
    tensors, metadata = _load(source / FILES[method], method)
    _save(folder / FILES[method], tensors, {k: v for k, v in metadata.items() if k != "target"}, target)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], target: TargetIdentity | None) -> None:
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata=metadata if target is None else {**metadata, "target": target.dumps()})
    temporary.replace(path)


def _load(path: Path, method: str, weights: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise KaruiError(f"speculation {method}: {path} does not exist; the model folder holds no {method} heads.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()} if weights else {}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a readable safetensors file ({error}); copy it again.") from error
    bad = [name for name, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise CorruptError(f"{path}: {bad[0]} holds values that are not finite.")
    return tensors, metadata
