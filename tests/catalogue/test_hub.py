"""End to end against a hub on this machine that speaks the hub's protocol: fetched once, found offline, refusals told apart."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "pytorch_model.bin": b"a pickle, never to be fetched",
    "modeling_tiny.py": b"raise SystemExit('code of a model was run')",
}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str] = []
    cut: str | None = None  # a file whose connection breaks half way

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        if path == "/":
            return self._send(200, b"hub", body)
        if "no/where" in path:
            return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        if "gated/model" in path:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        files = {k: v for k, v in FILES.items() if k != "model.safetensors"} if "only/pickle" in path else FILES
        if path.startswith("/api/models/"):
            if "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(v), "oid": hashlib.sha1(v).hexdigest()} for n, v in files.items()]
                return self._send(200, json.dumps(tree).encode(), body, {"Content-Type": "application/json"})
            info = {"id": "tiny/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            return self._send(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})
        name = path.rpartition("/")[2]
        if name not in files:  # what else the library asks its hub for
            return self._send(404, b"{}", body)
        content = files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if body and name == Hub.cut:
            Hub.cut = None
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + 10_000))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[:4])
            self.close_connection = True
            return None
        return self._send(200, content, body, headers)

    def _send(self, code, content, body, headers=None):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    Hub.asked, Hub.cut = [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fetch(name, hub, home, **extra):
    """`resolve` in a process of its own, since the library reads its endpoint when it is imported."""
    code = ("import sys\nfrom karui.catalogue import resolve\nfrom karui.configs.errors import KaruiError\n"
            "try:\n    print('folder', resolve(sys.argv[1]))\nexcept KaruiError as error:\n    print('error', error)")
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "TRANSFORMERS_OFFLINE"}
    env |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "KARUI_CACHE": str(home / "karui"), "no_proxy": "127.0.0.1", **extra}
    done = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip().splitlines()[-1].split(" ", 1)


def test_a_model_is_fetched_once_without_pickle_or_code_and_then_found_offline(hub, tmp_path):
    kind, folder = fetch("tiny/model", hub, tmp_path)
    assert kind == "folder", folder
    got = {p.name: p.read_bytes() for p in (Path(folder)).iterdir()}
    assert got == {k: v for k, v in FILES.items() if k not in ("pytorch_model.bin", "modeling_tiny.py")}
    assert not any("pytorch_model" in a or ".py" in a for a in Hub.asked)
    Hub.asked.clear()
    assert fetch("tiny/model", hub, tmp_path) == [kind, folder]
    assert fetch("tiny/model", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1") == [kind, folder]
    assert Hub.asked == []


def test_a_broken_download_is_told_and_taken_up_again(hub, tmp_path):
    Hub.cut = "model.safetensors"
    kind, message = fetch("tiny/model", hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="2")
    if kind == "error":  # the library may also have retried by itself
        assert "run the same command again" in message
        kind, message = fetch("tiny/model", hub, tmp_path)
    assert kind == "folder"
    assert (Path(message) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("no/where", "no repository no/where"), ("gated/model", "asks for an agreement"), ("only/pickle", "no pickled weights")],
)
def test_refusals_are_told_apart(hub, tmp_path, name, words):
    kind, message = fetch(name, hub, tmp_path)
    assert kind == "error" and words in message
