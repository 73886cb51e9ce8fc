"""Soft prompts over packed rows: prompt tuning (arXiv 2104.08691) and prefix tuning (2101.00190), in peft's parameters and files.

Documents lie end to end in one ragged row, so the virtual tokens are put before each of them, and are taken out again behind
the body. Both kinds work by rows of the sequence:

    prompt   the rows hold the trained embeddings; positions 0 .. P-1, the document's follow
    prefix   the rows hold zeros, and where a layer makes keys and values of them the trained ones take their place. Their
             position is 0, where the rotary embedding is the identity; the document begins at P, as with peft's cache

A prefix starts as the keys and values that the model itself makes of a text, or of tokens drawn from its vocabulary (the paper's
section 7.4). peft's start, normal random numbers, is no key that any layer has ever seen: SmolLM2-135M's loss on GSM8K answers
went from 1.84 to 5.04 by it.

An ordinary call (a padded batch, no `cu_seqlens`) goes peft's way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.adapters.files import quiet
from karui.catalogue.helpers import has_recurrent_layers
from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.steps import PromptStep

if TYPE_CHECKING:
    from peft import PeftModel


def attach_prompt(model: nn.Module, step: PromptStep, tokenizer: Any = None) -> PeftModel:
    """Freeze `model` and put a prompt or prefix before every document.

    Args:
        tokenizer: turns `step.text` into tokens; without a text it is not needed, and a prefix draws its tokens from torch's RNG.

    Raises:
        KaruiError: a text without a single token.
        UnsupportedError: a prefix for a model whose keys and values are not made by k_proj and v_proj; a model with recurrent
            layers.
    """
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    config: Any = model.config
    if has_recurrent_layers(config):
        raise UnsupportedError(f"prepare: {step.method} puts rows before a document's keys; a {config.model_type} has recurrent "
                               "layers, which keep none. Use lora.")
    kind: Any = PromptTuningConfig if step.method == "prompt" else PrefixTuningConfig
    with quiet():
        peft_model: Any = get_peft_model(model, kind(num_virtual_tokens=step.tokens, task_type="CAUSAL_LM"))
    install(peft_model)
    rows = None
    if step.text is not None:
        ids = tokenizer(step.text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise KaruiError("prepare: the prompt's text has no tokens; write some, or leave it out.")
        rows = torch.tensor([ids[i % len(ids)] for i in range(step.tokens)])
    embeddings = model.get_input_embeddings().weight  # type: ignore[operator]
    table = peft_model.prompt_encoder["default"].embedding.weight
    with torch.no_grad():
        if step.method == "prefix":
            drawn = torch.randint(len(embeddings), (step.tokens,)) if rows is None else rows
            table.copy_(_keys_and_values(model, drawn).view_as(table))
        elif rows is not None:
            table.copy_(embeddings[rows])
    return peft_model


def _keys_and_values(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[P, 2 layers, key-value width] of `ids` [P], as a prefix holds them: layer by layer, rotated keys, then values."""
    training = model.training
    cache = model.eval()(input_ids=ids.unsqueeze(0), use_cache=True).past_key_values
    model.train(training)
    both = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    if any(t.shape[2] != len(ids) or t.shape[1:] != both[0].shape[1:] for t in both):
        raise UnsupportedError(f"prefix: layers of {type(model).__name__} keep keys and values of different shapes; use prompt.")
    return torch.stack([t[0].transpose(0, 1).flatten(1).float() for t in both], 1)


def install(model: Any) -> None:
    """Teach the body of a peft prompt or prefix model to take packed rows."""
    config = model.active_peft_config
    body = model.get_base_model().get_decoder()
    if isinstance(body.forward, _Packed):
        return
    if config.peft_type == "PREFIX_TUNING":
        body.forward = _Prefixed(model, body)
    else:
        body.forward = _Prompted(model, body)


class _Packed:
    """The body's forward with P rows before every document."""

    def __init__(self, model: Any, body: Any) -> None:
        self.body, self.ordinary = body, body.forward
        self.encoder = model.prompt_encoder["default"]
        self.count: int = model.peft_config["default"].num_virtual_tokens
        self.virtual: torch.Tensor | None = None  # rows of the virtual tokens in the packed row at work; None: an ordinary call

    def __call__(self, input_ids: Any = None, position_ids: Any = None, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        if cu_seqlens is None:
            self.virtual = None
            return self.ordinary(input_ids=input_ids, position_ids=position_ids, **kwargs)
        shared = kwargs.get("shared_prefix", False)  # the first document is the beginning of all others: it alone gets the rows
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        before = torch.arange(len(cu_seqlens), device=cu_seqlens.device, dtype=cu_seqlens.dtype)  # insertions ahead
        before = before.clamp(max=1) if shared else before
        cu = cu_seqlens + self.count * before
        total = int(cu_seqlens[-1])
        rows = torch.arange(total, device=lengths.device) + self.count * before[1:].long().repeat_interleave(lengths)
        starts = cu[:1].long() if shared else cu[:-1].long()
        virtual = (starts.unsqueeze(1) + torch.arange(self.count, device=lengths.device)).reshape(-1)
        tokens = self.body.get_input_embeddings()(input_ids)[0]
        longer = tokens.new_zeros(total + len(virtual), tokens.shape[1])
        longer = longer.index_copy(0, rows, tokens).index_copy(0, virtual, self.embeddings(tokens).repeat(len(starts), 1))
        positions = position_ids.new_zeros(len(longer))
        positions[rows] = position_ids[0] + self.count
        positions[virtual] = self.positions(position_ids).repeat(len(starts))
        picked = kwargs.pop("loss_rows", None)  # the last layer computes these rows alone
        if picked is not None:
            kwargs["loss_rows"] = rows[picked]
        out = self.run(virtual, inputs_embeds=longer.unsqueeze(0), position_ids=positions.unsqueeze(0), cu_seqlens=cu, **kwargs)
        if picked is None:
            out.last_hidden_state = out.last_hidden_state.index_select(1, rows)
        return out

    def embeddings(self, like: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def run(self, virtual: torch.Tensor, **kwargs: Any) -> Any:
        return self.ordinary(**kwargs)


class _Prompted(_Packed):
    def embeddings(self, like: torch.Tensor) -> torch.Tensor:
        return self.encoder.embedding.weight.to(like.dtype)

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.count, device=like.device, dtype=like.dtype)


class _Prefixed(_Packed):
    def __init__(self, model: Any, body: Any) -> None:
        super().__init__(model, body)
        attentions = [m for m in body.modules() if hasattr(m, "k_proj") and hasattr(m, "v_proj")]
        if len(attentions) != model.peft_config["default"].num_layers:
            raise UnsupportedError(f"prefix: {type(body).__name__} has no k_proj and v_proj per layer; use prompt.")
        self.tables = 2 * len(attentions)
        for layer, attention in enumerate(attentions):
            keys = getattr(attention, "k_norm", None) or attention.k_proj
            keys.register_forward_hook(lambda _, __, out, row=2 * layer: self.put(row, out))
            attention.v_proj.register_forward_hook(lambda _, __, out, row=2 * layer + 1: self.put(row, out))

    def embeddings(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.count, like.shape[1])

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.count)

    def run(self, virtual: torch.Tensor, **kwargs: Any) -> Any:
        self.virtual = virtual
        return self.ordinary(**kwargs)

    def put(self, row: int, out: torch.Tensor) -> torch.Tensor:
        """The trained keys or values in the virtual tokens' rows of `out` [1, rows, ...]; also when a layer is recomputed."""
        if self.virtual is None:
            return out
        table = self.encoder.embedding.weight.view(self.count, self.tables, -1)  # [P, 2 layers, key-value width]
        values = table[:, row].to(out.dtype).repeat(len(self.virtual) // self.count, 1)
        return out.index_copy(1, self.virtual, values.view(1, len(self.virtual), *out.shape[2:]))
