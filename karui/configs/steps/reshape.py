"""Changing the architecture as a step of `prepare:`: other attention or feed-forward layers, healed by the training after it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from karui.configs.section import Section


class MergeHeadsStep(Section):
    """Fewer key-value heads, down to one; see `karui.distill.reshape.kv_heads`."""

    method: Literal["merge-kv-heads"]
    kv_heads: int = Field(ge=1, description="key-value heads left in each layer; must divide what the model has; 1 is MQA")
    pooling: Literal["mean", "first"] = Field("mean", description="of the heads of a group: their mean, or its first")


class WindowStep(Section):
    """Layers that look back a few tokens, between layers that see everything; see `karui.distill.reshape.window`."""

    method: Literal["sliding-window"]
    window: int = Field(ge=1, description="tokens a token sees in a local layer, itself among them")
    every: int | None = Field(4, ge=2, description="each n-th layer keeps full attention; null: none does")


class UpcycleStep(Section):
    """A mixture of experts from copies of the feed-forward layers; see `karui.distill.reshape.upcycle`."""

    method: Literal["upcycle-moe"]
    experts: int = Field(ge=2, le=4096, description="experts of each layer")
    top_k: int = Field(2, ge=1, description="experts a token goes through")
    split: int = Field(1, ge=1, description="experts that one copy of the feed-forward layer is cut into")
    correction: bool = Field(False, description="routers with the bias that moe.balance bias moves; the model becomes a glm4_moe")
    router_std: float = Field(0.02, gt=0, description="standard deviation of the routers' first weights")

    @model_validator(mode="after")
    def _fits(self) -> UpcycleStep:
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, more than the {self.experts} experts")
        if self.experts % self.split:
            raise ValueError(f"split is {self.split}, which does not divide the {self.experts} experts into whole copies")
        if self.top_k > self.split and self.top_k % self.split:
            raise ValueError(f"top_k is {self.top_k}, which is no whole number of copies of {self.split} experts each; give a "
                             f"multiple of split, or less than {self.split} to use a part of the feed-forward layer")
        return self


class LatentStep(Section):
    """Multi-head latent attention from grouped heads; see `karui.distill.reshape.latent`."""

    method: Literal["mla"]
    rank: int = Field(ge=2, description="width of the cached latent, one of it constant")
    rope_dims: int | None = Field(None, ge=2, description="width of the rotated key that all heads share; none: a head's")
    samples: int = Field(64, ge=1, description="training samples that calibrate it")


class SparseAttentionStep(Section):
    """An indexer that picks the keys a token of latent attention attends to; see `karui.distill.reshape.sparse`."""

    method: Literal["sparse-attention"]
    top_k: int = Field(ge=1, description="keys a token attends to; shorter texts are read as before")
    index_heads: int = Field(4, ge=1, description="heads of the indexer's queries")
    index_head_dim: int = Field(64, ge=2, description="width of the indexer's key, cached per token; at least the rotated key's")
    query_rank: int | None = Field(None, ge=2, description="width of the queries' latent, one of it constant, where the model "
                                   "has none; null: the hidden size")
    start: Literal["attention", "random"] = Field("attention", description="the indexer's heads: the attention's, or drawn")
    samples: int = Field(64, ge=1, description="training samples that calibrate it")
