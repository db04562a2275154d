"""An S3 server on the loopback interface whose answers a test can delay, replace or lose."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Environ = dict[str, Any]


class Bucket:
    """A fresh bucket. `Store(bucket.url, bucket.storage_options)` is in it."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server, self.name, self.url = server, name, f"s3://{name}/run"
        self.storage_options: dict[str, Any] = {
            "key": "test",
            "secret": "test",
            "endpoint_url": server.url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self) -> Any:
        """boto's own client, to look at the bucket past everything of ours."""
        import boto3

        options = self.storage_options
        return boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            region_name="us-east-1",
        )


class S3Server:
    """moto's server in a thread. Writes are one at a time, as moto does not make its conditions atomic itself.

    `fault` is given every request before it is carried out, and may change it. It returns None for nothing,
    ("before", status, code) for an answer in place of the effect, ("after", status, code) for one behind it.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._writing = threading.Lock()
        self.fault: Callable[[Environ], tuple[str, int, str] | None] = lambda request: None
        self.requests: list[Environ] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def bucket(self) -> Bucket:
        bucket = Bucket(self, f"bucket-{uuid.uuid4().hex[:12]}")
        bucket.client().create_bucket(Bucket=bucket.name)
        self.requests.clear()
        return bucket

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        self.requests.append(environ)
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
        fault = self.fault(environ)
        if fault is None:
            return self._carry_out(environ, start_response)
        when, status, code = fault
        if when == "after":
            list(self._carry_out(environ, lambda *answer: None))
        body = f"<Error><Code>{code}</Code><Message>{code} on purpose</Message></Error>".encode()
        start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _carry_out(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in {"GET", "HEAD"}:
            return list(self._app(environ, start_response))
        with self._writing:
            return list(self._app(environ, start_response))


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_expect_100(self) -> bool:
        return True  # werkzeug sends the "100 Continue"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def nth(number: int, fault: tuple[str, int, str], **wanted: str) -> Callable[[Environ], tuple[str, int, str] | None]:
    """The fault at the `number`-th request (from 1) whose environ has these values."""
    count = 0

    def meet(environ: Environ) -> tuple[str, int, str] | None:
        nonlocal count
        if any(environ.get(key) != value for key, value in wanted.items()):
            return None
        count += 1
        return fault if count == number else None

    return meet
