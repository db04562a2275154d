"""Names on the Hugging Face hub: with the real library against a server of our own on this machine, and without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ConfigError, ModelError
from batchgen.weights import hub, resolve

COMMITS = {"main": "1" * 40, "refs/pr/1": "2" * 40}
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "onnx/config.json": b"{}",
    "q/small.gguf": b"GGUF",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as the library needs to download a model."""

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].replace("%2F", "/").strip("/")
        if "/org/gated" in f"/{parts}":
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "org/name" not in parts:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if parts.startswith("api/models/org/name/tree/"):
            size = [{"type": "file", "path": p, "size": len(d), "oid": p.encode().hex()} for p, d in FILES.items()]
            return self._answer(200, json.dumps(size).encode())
        if parts.startswith("api/models/"):
            revision = parts.partition("/revision/")[2] or "main"
            commit = COMMITS.get(revision, revision if len(revision) == 40 else None)
            if commit is None:
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            info = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": path} for path in FILES]}
            return self._answer(200, json.dumps(info).encode())
        revision, _, file = parts.partition("/resolve/")[2].partition("/")
        if revision == "refs":
            revision, file = COMMITS["refs/pr/1"], file.removeprefix("pr/1/")
        if file not in FILES:
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        commit = COMMITS.get(revision, revision)
        self._answer(200, FILES[file], {"ETag": f'"{file.encode().hex()}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("huggingface_hub")
    found = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def ask(cache: Path, endpoint: str, path: str, revision: str = "", **environ: str) -> tuple[str, str]:
    """(Local path, or name and text of the error; what was logged): the library reads its environment at import."""
    code = """
import sys
from batchgen.errors import BatchgenError
from batchgen.weights import resolve
try:
    print(resolve(sys.argv[1], sys.argv[2] or None))
except BatchgenError as error:
    print(type(error).__name__, error)
"""
    more = {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", code, path, revision],
        check=False,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def below(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_model_is_downloaded_then_found_without_the_hub(server: str, tmp_path: Path) -> None:
    found, log = ask(tmp_path, server, "org/name")
    folder = Path(found)
    assert folder.name == COMMITS["main"] and "did not answer" not in log
    assert below(folder) == {"config.json", "model.safetensors", "chat_template.jinja"}  # no pickle, no code
    for path, more in (("hf://org/name", {"HF_HUB_OFFLINE": "1"}), ("hf://org/name", {}), ("org/name", {})):
        away = ask(tmp_path, "http://127.0.0.1:9", path, **more)
        assert away[0] == found
        assert "did not answer for org/name" in away[1] and found in away[1]
    missing, _ = ask(tmp_path / "empty", "http://127.0.0.1:9", "org/name")
    assert missing.startswith("StorageError") and "nor is it whole in its cache" in missing


def test_revisions_and_single_files(server: str, tmp_path: Path) -> None:
    assert Path(ask(tmp_path, server, "hf://org/name@refs/pr/1")[0]).name == COMMITS["refs/pr/1"]
    assert Path(ask(tmp_path, server, "org/name", "3" * 40)[0]).name == "3" * 40
    for path in ("hf://org/name/q/small.gguf", "hf://org/name@main/q/small.gguf", "org/name/q/small.gguf"):
        found = Path(ask(tmp_path / "one", server, path)[0])
        assert found.read_bytes() == b"GGUF"
        assert below(found.parents[1]) == {"q/small.gguf"}
    for path, message in (
        ("org/name/absent.gguf", "ModelError.*has no file absent.gguf"),
        ("hf://org/name@absent", "ModelError.*at revision 'absent' is neither"),
        ("org/absent", "ModelError.*nor found on the Hugging Face hub"),
        ("org/gated", "PermissionDenied.*gated.*HF_TOKEN"),
    ):
        found_text = ask(tmp_path, server, path)[0]
        assert re.search(message, found_text), found_text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", ("org/name", "r", None)),
        ("org/name/a/b.gguf", ("org/name", "r", "a/b.gguf")),
        ("hf://org/name@r", ("org/name", "r", None)),
        ("hf://org/name@r/a.gguf", ("org/name", "r", "a.gguf")),
        ("models/file.gguf", None),
        ("one/two/three", None),
        ("./org/name", None),
        ("org/../x.gguf", None),
    ],
)
def test_forms_of_a_name(path: str, expected: tuple[str, str, str | None] | None) -> None:
    assert hub.parse(path, "r") == expected


def test_wrong_names() -> None:
    for path in ("hf://name", "hf://org/name/folder", "hf://org/../x.gguf", "hf:///org/name"):
        with pytest.raises(ModelError, match="expected hf://org/name"):
            hub.parse(path, None)
    with pytest.raises(ConfigError, match=r"model.revision 'b'; give one of them"):
        hub.parse("hf://org/name@a", "b")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'batchgen\[hub\]'"):
        resolve("org/there")
