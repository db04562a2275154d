"""As much of Google Cloud Storage and of Azure Blob Storage, over HTTP, as shows which conditions a client sends."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

WHEN = "Mon, 30 Nov 2026 12:00:00 GMT"


class CloudServer:
    """Objects by name, each with a number that grows with every write. `knows_conditions` False: it ignores them."""

    def __init__(self, handler: type[_Handler]) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.writes: list[dict[str, str]] = []  # the conditions of each
        self.knows_conditions = True
        self.fails: list[int] = []  # statuses to answer the next writes with, after their effect
        self._last = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"cloud": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def write(self, name: str, data: bytes, *, new: bool, version: int | None, seen: dict[str, str]) -> int | None:
        """The object's new number; None where the condition does not hold."""
        with self._lock:
            self.writes.append(seen)
            there = self.objects.get(name)
            if self.knows_conditions and new and there is not None:
                return None
            if self.knows_conditions and version is not None and (there is None or there[0] != version):
                return None
            self._last += 1
            self.objects[name] = self._last, data
            return self._last


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cloud: CloudServer

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Google(_Handler):
    """The JSON interface."""

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path.partition("/o/")[2])

    def _json(self, status: int, value: Any) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def _about(self, name: str, number: int, data: bytes) -> dict[str, Any]:
        own = {"kind": "storage#object", "bucket": "bucket", "name": name, "size": str(len(data))}
        return own | {"generation": str(number), "etag": f"e{number}", "updated": "2026-11-30T12:00:00.000Z"}

    def do_POST(self) -> None:
        query, body = self.query, self.body()
        if "/b/bucket/o" not in self.path:
            self._json(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            return
        if query["uploadType"] == "media":
            name, data = query["name"], body
        else:
            boundary = b"--" + self.headers["Content-Type"].partition('boundary="')[2].rstrip('"').encode()
            _, about, content, _ = body.split(boundary)
            name = json.loads(about.partition(b"\n\n")[2])["name"]
            data = content.partition(b"\n\n")[2].removesuffix(b"\n")
        wanted = query.get("ifGenerationMatch")
        seen = {} if wanted is None else {"ifGenerationMatch": wanted}
        number = self.cloud.write(
            name, data, new=wanted == "0", version=int(wanted) if wanted not in (None, "0") else None, seen=seen
        )
        if self.cloud.fails:
            self._json(self.cloud.fails.pop(), {"error": {"message": "on purpose"}})
        elif number is None:
            self._json(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        else:
            self._json(200, self._about(name, number, data))

    def do_GET(self) -> None:
        name, query = self._name(), self.query
        if not name:
            prefix, items, folders = query.get("prefix", ""), [], set()
            for one, (number, data) in sorted(self.cloud.objects.items()):
                if one.startswith(prefix):
                    head, slash, _ = one[len(prefix) :].partition("/")
                    if slash and query.get("delimiter"):
                        folders.add(f"{prefix}{head}/")
                    else:
                        items.append(self._about(one, number, data))
            self._json(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)})
        elif name not in self.cloud.objects:
            self._json(404, {"error": {"code": 404, "message": "No such object"}})
        elif query.get("alt") == "media":
            self.answer(200, self.cloud.objects[name][1])
        else:
            self._json(200, self._about(name, *self.cloud.objects[name]))

    def do_DELETE(self) -> None:
        if self.cloud.objects.pop(self._name(), None) is None:
            self._json(404, {"error": {"code": 404, "message": "No such object"}})
        else:
            self.answer(204)


class Azure(_Handler):
    """The Blob service at an emulator's address: /account/container/name."""

    def _name(self) -> str:
        return "/".join(unquote(urlsplit(self.path).path).split("/")[3:])

    def _error(self, status: int, code: str) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>on purpose</Message></Error>'.encode()
        self.answer(status, body, Content_Type="application/xml", x_ms_error_code=code)

    def _facts(self, number: int) -> dict[str, str]:
        return {"ETag": f'"0x{number}"', "Last_Modified": WHEN, "x_ms_blob_type": "BlockBlob"}

    def _no_container(self) -> bool:
        if urlsplit(self.path).path.split("/")[2] == "bucket":
            return False
        self._error(404, "ContainerNotFound")
        return True

    def do_PUT(self) -> None:
        data = self.body()
        if self._no_container():
            return
        seen = {key: self.headers[key] for key in ("If-None-Match", "If-Match") if self.headers[key]}
        version = int(seen["If-Match"].strip('"')[2:]) if "If-Match" in seen else None
        number = self.cloud.write(self._name(), data, new="If-None-Match" in seen, version=version, seen=seen)
        if self.cloud.fails:
            self._error(self.cloud.fails.pop(), "ServerBusy")
        elif number is None:
            self._error(*(409, "BlobAlreadyExists") if version is None else (412, "ConditionNotMet"))
        else:
            self.answer(201, **self._facts(number))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self._no_container():
            return
        if self.query.get("comp") == "list":
            self._list()
            return
        if self._name() not in self.cloud.objects:
            self._error(404, "BlobNotFound")
            return
        number, data = self.cloud.objects[self._name()]
        facts, asked = self._facts(number), self.headers.get("x-ms-range") or self.headers.get("Range")
        if self.command == "GET" and asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            if int(first) >= len(data):
                self._error(416, "InvalidRange")
                return
            part = data[int(first) : int(last) + 1]
            facts["Content_Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self.answer(206, part, **facts)
        else:
            self.answer(200, data, **facts)

    def _list(self) -> None:
        prefix, found, folders = self.query.get("prefix", ""), [], set()
        for name, (number, data) in sorted(self.cloud.objects.items()):
            if not name.startswith(prefix):
                continue
            head, slash, _ = name[len(prefix) :].partition("/")
            if slash and self.query.get("delimiter"):
                folders.add(f"<BlobPrefix><Name>{escape(prefix + head)}/</Name></BlobPrefix>")
            else:
                found.append(
                    f"<Blob><Name>{escape(name)}</Name><Properties><Etag>0x{number}</Etag><Last-Modified>{WHEN}"
                    f"</Last-Modified><Content-Length>{len(data)}</Content-Length><BlobType>BlockBlob</BlobType>"
                    "</Properties></Blob>"
                )
        blobs = f"<Blobs>{''.join(found)}{''.join(sorted(folders))}</Blobs><NextMarker />"
        body = f'<EnumerationResults ContainerName="bucket">{blobs}</EnumerationResults>'
        self.answer(200, f'<?xml version="1.0" encoding="utf-8"?>{body}'.encode(), Content_Type="application/xml")

    def do_DELETE(self) -> None:
        if self.cloud.objects.pop(self._name(), None) is None:
            self._error(404, "BlobNotFound")
        else:
            self.answer(202)
