"""`SpeculationConfig`: which proposer, how long its drafts, with a short spelling for recipes and command lines."""

from __future__ import annotations

from dataclasses import dataclass

from karui.configs.errors import KaruiError, nearest

METHODS = ("none", "ngram", "draft", "lookahead", "medusa", "eagle3")
SPELLINGS = "none, ngram[:K], draft:PATH[:K], lookahead[:N,W,G], medusa[:NODES][,any-target], eagle3[:DEPTH][,any-target]"
ANY_TARGET = "any-target"


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How an engine speculates. `parse` and `str` are inverse.

    Attributes:
        method: one of `METHODS`.
        k: drafted tokens: length (ngram, draft), depth (eagle3), most nodes (medusa); unused by lookahead. None: 4 for draft, for
            medusa 3 with the native runner, where every verified row costs, and else 24, for the others 5.
        path: the draft model's folder or catalogue name.
        n_min, n_max: shortest and longest match of prompt lookup.
        lookahead: (N, W, G): n-gram length, window columns, guesses verified per step.
        width, nodes: children looked at per node and kept nodes of eagle3's tree; width 1 drafts a chain. None: 2 and 3 with the
            native runner, else 4 and 24. medusa: width is the candidates of each head (None: 8).
        least: a draft of eagle3 or medusa that promises fewer accepted tokens, by its own likelihoods, gives way to a plain step.
            None: 0.25 for eagle3 with the native runner, else 0.
        adaptive: switch off while it does not pay, and where the runner decodes several rounds at once verify only as much of a
            draft as is worth it (timings decide; the tokens are the same either way).
        typical: accept by Medusa's typical acceptance. LOSSY: the output is no longer the target's.
        any_target: use medusa or eagle3 heads that were made for another model of the same shape, such as the one that this was
            fine-tuned from. The output stays the target's; how much is accepted depends on how near the two are.
    """

    method: str = "none"
    k: int | None = None
    path: str | None = None
    n_min: int = 2
    n_max: int = 4
    lookahead: tuple[int, int, int] = (5, 7, 7)
    width: int | None = None
    nodes: int | None = None
    least: float | None = None
    adaptive: bool = True
    typical: bool = False
    any_target: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise KaruiError(f"speculation: unknown method {self.method!r}; valid: {SPELLINGS}.{nearest(self.method, METHODS)}")
        if self.k is not None and not 1 <= self.k <= 63:
            raise KaruiError(f"speculation: {self.method} drafts 1 to 63 tokens, got {self.k}.")
        if (self.path is not None) != (self.method == "draft"):
            raise KaruiError("speculation: a path belongs to draft:PATH[:K] and to nothing else.")
        if any(v is not None and v < 1 for v in (self.width, self.nodes)):
            raise KaruiError(f"speculation: width and nodes must be at least 1, got {self.width} and {self.nodes}.")
        if self.typical and self.method not in ("medusa", "eagle3"):
            raise KaruiError(f"speculation: typical acceptance goes with medusa or eagle3, not with {self.method}.")
        if self.any_target and self.method not in ("medusa", "eagle3"):
            raise KaruiError(f"speculation: any_target goes with medusa or eagle3, not with {self.method}.")

    def length(self, native: bool = False) -> int:
        """`k`, or its default with the native runner or another one."""
        return self.k or {"draft": 4, "medusa": 3 if native else 24}.get(self.method, 5)

    @staticmethod
    def parse(text: str) -> SpeculationConfig:
        """Read the short spelling. Raises `KaruiError` naming the valid ones."""
        method, _, rest = text.strip().partition(":")
        if method == "draft":
            path, _, number = rest.rpartition(":")
            if not path or not number.isdigit():
                path, number = rest, ""
            if not path:
                raise KaruiError(f"speculation {text!r}: draft needs a model, as in draft:PATH:4.")
            return SpeculationConfig(method=method, path=path, k=int(number) if number else None)
        if method == "lookahead" and rest:
            parts = rest.split(",")
            if len(parts) != 3 or not all(p.isdigit() for p in parts):
                raise KaruiError(f"speculation {text!r}: lookahead takes N,W,G as in lookahead:5,7,7.")
            return SpeculationConfig(method=method, lookahead=(int(parts[0]), int(parts[1]), int(parts[2])))
        head, comma, suffix = text.strip().partition(",")
        method, _, number = head.partition(":")
        if (comma and (method not in ("medusa", "eagle3") or suffix != ANY_TARGET)) or (
                number and (not number.isdigit() or method in ("none", "lookahead"))):
            raise KaruiError(f"speculation {text!r}: cannot read {rest or suffix!r}; valid: {SPELLINGS}.")
        return SpeculationConfig(method=method, k=int(number) if number else None, any_target=bool(comma))

    def __str__(self) -> str:
        if self.method == "lookahead":
            return "lookahead:{},{},{}".format(*self.lookahead)
        parts = [self.method, self.path, None if self.k is None else str(self.k)]
        return ":".join(p for p in parts if p) + (f",{ANY_TARGET}" if self.any_target else "")
