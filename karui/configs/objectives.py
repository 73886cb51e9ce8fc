"""What is minimised: one section per kind of `objective:`. `karui.trainers.objectives` holds the code behind each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from karui.configs.quantspec import QuantSpec
from karui.configs.section import Section

Share = Annotated[float, Field(ge=0, le=1e6)]
Weight = Share | tuple[Share, Share]
"""A constant, or [from, to]: linear over the run."""
Divergence = Literal[
    "forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl", "total_variation", "sorted_l1"
]


class IndexerSection(Section):
    """Training the indexers of sparse attention (arXiv 2512.02556); see docs/architecture.md."""

    warm_up: float = Field(0.0, ge=0, le=1, description="share of the steps in which only indexers are trained, attention dense")
    lr_scale: float = Field(10.0, gt=0, description="the indexers' learning rate is optim.lr times this")


class SftObjective(Section):
    """Cross entropy of the supervised tokens."""

    kind: Literal["sft"] = "sft"
    indexer: IndexerSection | None = Field(None, description="train the indexers of sparse attention; null: leave them")
    chunk_tokens: int = Field(1024, ge=1, description="supervised tokens whose logits exist at one moment")


class TeacherSection(Section):
    """Who teaches. A bare string in the recipe is the same as `{name: ...}`."""

    name: str | None = Field(None, description="catalogue name, hub id or folder; null: the recipe's model as it was loaded")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    base: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("none"), description="grid of its linears, e.g. nf4dq")
    offload: bool = Field(False, description="leave the weights in their file and read layer by layer")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class FeatureTerm(Section):
    """Hidden states at paired depths; see `karui.distill.features`."""

    weight: Weight = 1.0
    loss: Literal["mse", "cosine"] = "cosine"
    layers: Literal["uniform", "kept", "embedding", "last"] | tuple[tuple[int, int], ...] = Field(
        "uniform", description="a layer map, or pairs [student depth, teacher depth]")


class RelationTerm(Section):
    """How tokens lie to one another; see `karui.distill.relations`."""

    weight: Weight = 1.0
    relation: Literal["distance", "angle", "value"] = "value"
    heads: int = Field(4, ge=1, description="relation heads of `value`")
    most: int = Field(64, ge=3, description="tokens of a document that distances and angles look at")


class DistilObjective(Section):
    """A teacher's distribution, features and relations beside the labels, on the data's own text."""

    kind: Literal["distil"] = "distil"
    teacher: TeacherSection = TeacherSection()
    label: Weight = Field(0.0, description="weight of the labels' cross entropy")
    logits: Weight = Field(1.0, description="weight of the divergence from the teacher's distribution")
    divergence: Divergence = "forward_kl"
    parameter: float | None = Field(None, ge=0, le=1, description="jsd: beta; skewed: alpha")
    temperature: float = Field(1.0, gt=0, le=1000, description="of the loss")
    rows: Literal["full", "topk", "sampled"] = Field("full", description="how much of the teacher's distribution is looked at")
    k: int = Field(50, ge=1, description="topk: tokens kept; sampled: tokens drawn")
    cache: str | None = Field(None, description="topk and sampled: auto, or a folder; the teacher runs once for all students")
    align: Literal["ids", "bytes"] = Field("ids", description="bytes: a teacher with another tokenizer")
    features: tuple[FeatureTerm, ...] = ()
    relations: tuple[RelationTerm, ...] = ()
    indexer: IndexerSection | None = Field(None, description="train the indexers of sparse attention; null: leave them")
    chunk_tokens: int = Field(128, ge=1, description="supervised tokens whose logits exist at one moment")

    @model_validator(mode="after")
    def _fits(self) -> DistilObjective:
        _parameter_fits(self.divergence, self.parameter)
        if self.k != 50 and self.rows == "full":
            raise ValueError("k belongs to rows: topk or sampled")
        if self.cache is not None and self.rows == "full":
            raise ValueError("a cache holds topk or sampled rows; write rows: topk")
        if self.cache is not None and (self.features or self.relations):
            raise ValueError("features and relations need the teacher at work; leave the cache out")
        if self.rows == "sampled" and self.divergence != "forward_kl":
            raise ValueError("sampled rows estimate forward_kl and no other divergence")
        if self.align == "bytes" and (self.rows != "full" or self.features or self.relations):
            raise ValueError("align: bytes compares full rows and nothing else")
        if self.divergence == "sorted_l1" and self.rows != "full":
            raise ValueError("sorted_l1 needs full rows")
        return self


class OnPolicyObjective(Section):
    """The student's own text, judged token by token by the teacher."""

    kind: Literal["on-policy"] = "on-policy"
    teacher: TeacherSection = TeacherSection()
    loss: Literal["divergence", "policy-gradient"] = Field(
        "divergence", description="divergence: GKD (arXiv 2306.13649); policy-gradient: reverse KL of the drawn tokens")
    divergence: Divergence = "jsd"
    parameter: float | None = Field(None, ge=0, le=1, description="jsd: beta, 0.5 when not given; skewed: alpha")
    temperature: float = Field(1.0, gt=0, le=1000, description="of the loss; the sampler's is sample_temperature")
    on_policy: float = Field(1.0, ge=0, le=1, description="share of samples whose text the student writes (GKD's lambda)")
    off_policy_first: float = Field(0.0, ge=0, lt=1, description="share of the run that stays on the data's text (Qwen3)")
    max_new_tokens: int = Field(128, ge=1)
    sample_temperature: float = Field(1.0, gt=0, le=1000)
    top_p: float = Field(1.0, gt=0, le=1, description="below 1 the rollouts are no longer the student's distribution")
    staleness: int = Field(0, ge=0, description="updates the sampler's weights may lag behind")
    max_ratio: float = Field(5.0, gt=1, description="bound of the importance ratio (policy-gradient)")
    max_drift: float = Field(0.5, gt=0, description="largest mean |log p_trainer - log p_sampler| of fresh rollouts")
    unfinished: Literal["keep", "drop"] = Field("keep", description="rollouts that reach max_new_tokens without an end")
    engine: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("none"), description="grid of the sampler's linears")
    chunk_tokens: int = Field(128, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _half(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("divergence", "jsd") == "jsd" and value.get("parameter") is None:
            return {**value, "parameter": 0.5}
        return value

    @model_validator(mode="after")
    def _fits(self) -> OnPolicyObjective:
        if self.loss == "divergence":
            _parameter_fits(self.divergence, self.parameter)
        return self


class MedusaObjective(Section):
    """Heads that guess tokens ahead from the frozen model's last hidden state (arXiv 2401.10774)."""

    kind: Literal["draft-medusa"] = "draft-medusa"
    heads: int = Field(3, ge=1, le=8)
    num_layers: int = Field(1, ge=1, le=4, description="residual blocks of each head")
    projection: Literal["shared", "own"] = Field(
        "shared", description="shared: all heads project by the model's own, frozen; own: each trains one of its size")
    vocabulary: int | None = Field(
        None, ge=16, description="most frequent tokens of the data that can be drafted (shared only); null: all")
    decay: float = Field(0.8, gt=0, le=1, description="weight of head i is decay^i")
    states: Literal["model", "engine"] = Field(
        "model", description="what computes the states; engine: as they are served, quantized by the run's prepare step")
    keep_states: bool = Field(False, description="keep the model's states in memory: later epochs do not run it")
    chunk_tokens: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> MedusaObjective:
        if self.vocabulary is not None and self.projection == "own":
            raise ValueError("a vocabulary goes with projection: shared; heads with their own draft every token")
        return self


class Eagle3Objective(Section):
    """One drafting layer over the frozen model's residual streams (arXiv 2503.01840)."""

    kind: Literal["draft-eagle3"] = "draft-eagle3"
    steps: int = Field(5, ge=1, le=10, description="passes of training-time test")
    decay: float = Field(0.8, gt=0, le=1, description="weight of pass i is decay^i")
    vocabulary: int = Field(4096, ge=16, description="most frequent tokens of the data that it can draft")
    intermediate: int | None = Field(None, ge=8, le=1_000_000, description="width of its feed-forward layer; null: the model's")
    kv_heads: int | None = Field(None, ge=1, description="key-value heads; more of them copy more exactly; null: the model's")
    soft: bool = Field(True, description="learn the model's distribution; false: its text")
    start: Literal["copy", "random"] = Field("copy", description="copy: the layer's attention begins as an induction head")
    states: Literal["model", "engine"] = Field(
        "model", description="what computes the states; engine: as they are served, quantized by the run's prepare step")
    keep_states: bool = Field(False, description="keep the model's states in memory: later epochs do not run it")
    chunk_tokens: int = Field(128, ge=1)


def _parameter_fits(divergence: str, parameter: float | None) -> None:
    wanted = divergence in ("jsd", "skewed_kl", "skewed_reverse_kl")
    if wanted and parameter is None:
        raise ValueError(f"{divergence} needs objective.parameter between 0 and 1")
    if not wanted and parameter is not None:
        raise ValueError(f"{divergence} has no parameter; leave objective.parameter out")


def _sft_by_default(value: object) -> object:
    return {"kind": "sft", **value} if isinstance(value, dict) else value


ObjectiveSection = Annotated[
    SftObjective | DistilObjective | OnPolicyObjective | MedusaObjective | Eagle3Objective,
    Field(discriminator="kind"), BeforeValidator(_sft_by_default),
]
