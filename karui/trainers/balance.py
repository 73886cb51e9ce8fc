"""`moe:` at work: the routers of a mixture are watched while the objective runs, its gradient gets the balancing losses' added,
and what was sent where goes to the log.

Every figure is of the whole update: sums over micro-batches and ranks of the tokens of documents that carry loss (what fills up a
rank's or a group's row does not count), divided once. The batch-wise loss f_i P_i multiplies two means over the update, of which
f_i would be known after the last micro-batch only; it is taken from the update before, so that one pass suffices and the gradient
is the same for every cut. Where the first update of a run has none, f is even and that update balances nothing. The document-wise
loss is weighted by the documents' tokens and needs nothing of other micro-batches; the bias moves once per update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import MoeSection, Recipe
from karui.distill import balance
from karui.distill.routers import COUNTS, Routed, Router, bias_of, find_routers, hooks
from karui.trainers.data import PackedBatch, documents_of_tokens
from karui.trainers.sharding import split_like, whole

if TYPE_CHECKING:
    from accelerate import Accelerator

    from karui.trainers.model import LossSum

_SUMS = ("load", "share", "entropy", "tokens", "sequence", "z")


class Routers:
    """The routers of a run. `follow` ties them to an objective; `begin` and `finish` enclose an update.

    Args:
        routers: of the model that is trained, at least one.
    """

    def __init__(self, routers: list[Router], section: MoeSection) -> None:
        self.routers, self.section = routers, section
        self.loads: list[torch.Tensor] | None = None  # of the update before: tokens sent to each expert over all tokens
        self.scale = 0.0
        self.seen: list[list[Routed]] = [[] for _ in routers]
        self.handles: list[Any] = []
        self.sums: list[dict[str, torch.Tensor]] = [{} for _ in routers]

    def follow(self, loss: LossSum) -> None:
        """Watch the routers while `loss` runs, and add to its gradient; its value stays the objective's own."""
        loss.register_forward_pre_hook(self._open)
        loss.register_forward_hook(self._close)

    def begin(self, supervised: int, tokens: int) -> None:
        """Start an update of so many supervised and so many counted tokens, over all ranks."""
        self.scale = supervised / max(1, tokens)  # the reducer divides by the supervised ones
        self.sums = [{} for _ in self.routers]

    def _open(self, loss: Any, args: Any) -> None:
        self._stop()
        if loss.training and torch.is_grad_enabled():
            self.handles = hooks(self.routers, self.seen)

    def _stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for seen in self.seen:
            seen.clear()

    def _close(self, loss: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        if not self.handles:
            return out
        tokens, _, cu_seqlens, targets = args
        documents, counted = _documents(cu_seqlens, targets)
        if (context := loss.context) is not None:
            size = -(-len(tokens) // context.size)
            counted = nn.functional.pad(counted, (0, size * context.size - len(tokens)))[context.rank * size :][:size]
        number = len(cu_seqlens) - 1
        added = out.new_zeros((), dtype=torch.float32)
        with torch.autocast(out.device.type, enabled=False):
            for i, seen in enumerate(self.seen if counted.any() else []):
                for logits, indices in seen:
                    if self.section.active:
                        added = added + self._layer(i, logits[counted], indices[counted], documents[counted], number)
                    else:  # rows that no loss depends on may have been left out
                        rows = counted if len(logits) == len(counted) else slice(None)
                        with torch.no_grad():
                            self._layer(i, logits[rows], indices[rows], documents, number)
        self._stop()
        return out + ((added - added.detach()) * self.scale).to(out.dtype) if self.section.active else out

    def _layer(self, i: int, logits: torch.Tensor, indices: torch.Tensor, documents: torch.Tensor, number: int) -> torch.Tensor:
        """The weighted loss of a layer, summed over its tokens, whose figures are noted."""
        section, experts, k = self.section, logits.shape[1], indices.shape[1]
        added = logits.new_zeros((), dtype=torch.float32)
        share = balance.shares(logits, self.routers[i].sigmoid)
        if section.balance == "switch":
            load = torch.full((experts,), k / experts) if self.loads is None else self.loads[i]
            added = added + section.loss_weight * balance.switch_sum(share, load.to(share.device))
        elif section.loss_weight:
            value = balance.sequence_sum(share, k, documents, number)
            self._note(i, "sequence", value)
            added = added + section.loss_weight * value
        if section.z_loss:
            value = balance.z_sum(logits)
            self._note(i, "z", value)
            added = added + section.z_loss * value
        self._note(i, "load", balance.counts(indices, experts))
        self._note(i, "share", share.sum(0))
        self._note(i, "entropy", torch.special.entr(share.detach()).sum() / math.log(experts))
        self._note(i, "tokens", torch.tensor(len(share), device=share.device))
        return added

    def _note(self, i: int, key: str, value: torch.Tensor) -> None:
        value = value.detach().double().reshape(-1)
        self.sums[i][key] = self.sums[i][key] + value if key in self.sums[i] else value

    def finish(self, accelerator: Accelerator, *, skipped: bool) -> dict[str, float]:
        """Sum over the ranks, move what moves with an update that was not left out, and give the figures; a collective."""
        section, sums = self.section, self._whole(accelerator)
        tokens = [float(s["tokens"]) for s in sums]
        if not tokens[0]:
            return {}
        loads = [s["load"] for s in sums]
        found = balance.figures(loads, sum(float(s["entropy"]) / n for s, n in zip(sums, tokens)) / len(tokens))
        if section.balance == "switch":
            found["moe_balance_loss"] = section.loss_weight * sum(
                float(balance.switch_sum((s["share"] / n)[None], s["load"] / n)) for s, n in zip(sums, tokens))
        elif section.loss_weight:
            found["moe_balance_loss"] = section.loss_weight * sum(float(s["sequence"]) / n for s, n in zip(sums, tokens))
        if section.z_loss:
            found["moe_z_loss"] = section.z_loss * sum(float(s["z"]) / n for s, n in zip(sums, tokens))
        if not skipped and section.balance == "switch":
            self.loads = [(load / n).float() for load, n in zip(loads, tokens)]
        if not skipped and section.balance == "bias":
            self._move(loads)
        return found

    @torch.no_grad()
    def _move(self, loads: list[torch.Tensor]) -> None:
        for router, load in zip(self.routers, loads):
            bias = router.bias
            assert bias is not None
            bias.copy_(split_like(balance.moved(whole(bias), load.to(bias.device), self.section.speed), bias))

    def _whole(self, accelerator: Accelerator) -> list[dict[str, torch.Tensor]]:
        """The sums over all ranks, on the host, of which a rank may have none."""
        sizes = [(i, key, r.experts if key in ("load", "share") else 1) for i, r in enumerate(self.routers) for key in _SUMS]
        flat = torch.cat([self.sums[i].get(key, torch.zeros(n)).to(accelerator.device, torch.float64) for i, key, n in sizes])
        total = accelerator.reduce(flat, "sum").cpu().split([n for _, _, n in sizes])
        return [dict(zip(_SUMS, total[i * len(_SUMS) :])) for i in range(len(self.routers))]

    def line(self) -> str:
        """What is done, for the log."""
        s = self.section
        done = {"none": "not balanced", "bias": f"balanced by their bias, {s.speed:g} an update"}.get(
            s.balance, f"balanced by {s.balance}, weight {s.loss_weight:g}")
        beside = f", sequence-wise loss of weight {s.loss_weight:g}" if s.balance == "bias" and s.loss_weight else ""
        z = f", z-loss of weight {s.z_loss:g}" if s.z_loss else ""
        return f"moe: {len(self.routers)} routers of {self.routers[0].experts} experts, {done}{beside}{z}"

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold beside the model, whose buffers hold the biases."""
        return {} if self.loads is None else {str(i): load for i, load in enumerate(self.loads)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        self.loads = [state[str(i)] for i in range(len(self.routers))] if state else None


def counted_tokens(batch: PackedBatch) -> int:
    """Tokens of the documents that carry loss."""
    return int(_documents(batch.cu_seqlens, batch.targets)[1].sum())


def _documents(cu_seqlens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] each token's document, and whether that carries loss."""
    documents, _, supervised = documents_of_tokens(cu_seqlens, targets)
    return documents, supervised[documents] > 0


def check(recipe: Recipe, config: Any) -> None:
    """Refuse, from the configuration that the recipe's steps leave, what `moe:` asks for in vain.

    Raises:
        KaruiError: a model without experts, routers that are not trained.
        UnsupportedError: balancing where documents are cut over ranks, or by a bias that the model does not have.
    """
    section = recipe.moe
    if not section.active:
        return
    from karui.trainers.stages import stage_class

    what = f"moe.balance is {section.balance}" if section.balance != "none" else f"moe.z_loss is {section.z_loss:g}"
    text = config.get_text_config()
    if not any(isinstance(n := getattr(text, key, None), int) and n > 1 for key in COUNTS):
        raise KaruiError(f"{what}, and a model of type {config.model_type} has no mixture of experts; leave moe: out, or make "
                         "one with a step upcycle-moe in prepare:.")
    if step := next((s for s in recipe.prepare if stage_class(s).is_adapter), None):
        raise KaruiError(f"{what}, but with an adapter ({step.method}) the routers are frozen and nothing of them is saved: "
                         "nothing can be balanced. Leave moe: out, or train whole weights.")
    if recipe.objective.kind.startswith("draft-"):
        raise KaruiError(f"{what}, but objective {recipe.objective.kind} leaves the model as it is: nothing can be balanced. "
                         "Leave moe: out.")
    if recipe.run.context_parallel > 1:
        raise UnsupportedError(f"{what}, which counts whole documents, and run.context_parallel cuts them; set it to 1.")
    if section.balance == "bias":
        from karui.distill.reshape import skeleton

        if not any(bias_of(m) for m in skeleton(config).modules() if hasattr(m, "experts")):
            raise UnsupportedError(f"moe.balance is bias, and routers of a {config.model_type} have no correction bias (those of "
                                   "deepseek_v3, glm4_moe, minimax_m2, ernie4_5_moe, ... have one); valid here: none, switch, "
                                   "sequence.")


def watch(recipe: Recipe, loss: LossSum) -> None:
    """Give an objective its routers, if the model has any.

    Raises:
        UnsupportedError: routers of a kind that is not known, where they are to be balanced.
        KaruiError: routers that are frozen.
    """
    section = recipe.moe
    routers = find_routers(loss.model)
    for router in routers:
        if isinstance(router.bias, nn.Parameter):  # it only chooses, and never has a gradient
            router.bias.requires_grad_(False)
    if section.active:
        if not routers:
            raise UnsupportedError(f"moe: routers of a {type(loss.model).__name__} are not laid out as in transformers' newer "
                                   "mixtures (logits, weights, indices), so that they cannot be balanced; leave moe: out.")
        frozen = [r.name for r in routers if not any(p.requires_grad for p in r.module.parameters())]
        if frozen and (section.loss_weight or section.z_loss):
            raise KaruiError(f"moe: the router of {frozen[0]} is frozen by this recipe's steps, so that no loss can move it; "
                             "leave moe: out.")
        if section.balance == "bias":
            for router in routers:
                _in_fp32(router)
        loss.every_row = True
    if routers:
        loss.routers = Routers(routers, section)
        loss.routers.follow(loss)


def _in_fp32(router: Router) -> None:
    """Steps of a thousandth are lost in a bias of 16 bits."""
    held = bias_of(router.block)
    if held is None:
        raise UnsupportedError(f"moe.balance is bias, and the router of {router.name} has no correction bias; valid here: none, "
                               "switch, sequence.")
    owner, name = held
    bias: torch.Tensor = getattr(owner, name)
    if bias.dtype != torch.float32:
        bias.data = bias.data.float()
