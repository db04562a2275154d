"""Notices of interruption, from a stand-in of each cloud's metadata service on loopback."""

from __future__ import annotations

import ast
import json
import logging
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from batchgen import spot
from batchgen.spot import SpotWatch


class Cloud(ThreadingHTTPServer):
    """What the three services share: an answer for each request, a list of what was asked, and failures on demand."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str, int]] = []
        self.delay = 0.0
        self.broken: tuple[int, str] | None = None  # a status and an answer for whatever is asked

    def answer(self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str]) -> tuple:
        raise NotImplementedError

    def count(self, status: int, path: str = "") -> int:
        return sum(seen == status and path in where for _, where, seen in self.asked)


class Handler(BaseHTTPRequestHandler):
    server: Cloud

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.server.broken is not None:
            status, body, more = *self.server.broken, {}
        else:
            status, body, more = self.server.answer(self.command, url.path, parse_qs(url.query), headers)
        self.server.asked.append((self.command, url.path, status))
        time.sleep(self.server.delay)
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = handle_any

    def log_message(self, *args: object) -> None:
        pass


class FakeAws(Cloud):
    """EC2: PUT for a token that lives as long as asked, then GET with it."""

    notice: dict[str, str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, float] = {}
        self.left: list[float] = []  # of the last token, when the next one was asked for

    def answer(self, method: str, path: str, query: dict, headers: dict) -> tuple:
        if path == "/latest/api/token":
            seconds = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT":
                return 405, "", {}
            if not seconds.isdigit() or not 1 <= int(seconds) <= 21_600 or "x-forwarded-for" in headers:
                return 400, "", {}
            self.left += [end - time.monotonic() for end in list(self.tokens.values())[-1:]]
            token = secrets.token_urlsafe(32) + "=="
            self.tokens[token] = time.monotonic() + int(seconds)
            return 200, token, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": seconds}
        if self.tokens.get(headers.get("x-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
            return 401, "", {}
        if path == "/latest/meta-data/spot/instance-action" and method == "GET" and self.notice is not None:
            return 200, json.dumps(self.notice), {}
        return 404, "<h1>404 - Not Found</h1>", {}


class FakeGcp(Cloud):
    preempted = False

    def answer(self, method: str, path: str, query: dict, headers: dict) -> tuple:
        flavor = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
            return 403, "Missing required header: Metadata-Flavor", flavor
        if path != "/computeMetadata/v1/instance/preempted" or method != "GET":
            return 404, "", flavor
        return 200, "TRUE" if self.preempted else "FALSE", flavor


class FakeAzure(Cloud):
    machine = "worker_3"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict] = []

    def answer(self, method: str, path: str, query: dict, headers: dict) -> tuple:
        if headers.get("metadata") != "true" or "x-forwarded-for" in headers:
            return 400, '{"error": "Bad request. Required metadata header not specified"}', {}
        if not path.startswith("/metadata/") or method != "GET":
            return 404, "", {}
        if "api-version" not in query:
            return 400, '{"error": "Bad request. api-version was not specified in the request"}', {}
        if path == "/metadata/instance/compute/name":
            return (200, self.machine, {}) if query.get("format") == ["text"] else (200, json.dumps(self.machine), {})
        if path == "/metadata/scheduledevents":
            return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}), {}
        return 404, "", {}


def event(
    kind: str, seconds: float = 30, *, resources: tuple[str, ...] = ("worker_3",), status: str = "Scheduled"
) -> dict:
    begins = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    return {
        "EventId": "C1BF8322",
        "EventStatus": status,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": format_datetime(begins, usegmt=True) if status == "Scheduled" else "",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    yield from served(FakeAws())


@pytest.fixture
def gcp() -> Iterator[FakeGcp]:
    yield from served(FakeGcp())


@pytest.fixture
def azure() -> Iterator[FakeAzure]:
    yield from served(FakeAzure())


def served(cloud: Cloud) -> Iterator:
    thread = threading.Thread(target=cloud.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield cloud
    cloud.shutdown()
    thread.join()
    cloud.server_close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "batchgen.spot")
    return caplog


def until(condition: Callable[[], object], seconds: float = 10.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("waited in vain")


def watch(kind: str, cloud: Cloud) -> SpotWatch:
    return SpotWatch(kind, base_url=cloud.url, interval=0.01)


# -- AWS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_announces(aws: FakeAws, action: str, log: pytest.LogCaptureFixture) -> None:
    with watch("aws", aws) as watching:
        until(lambda: aws.count(404) >= 3)
        assert watching.notice is None
        aws.notice = {"action": action, "time": "2026-09-18T08:22:00Z"}
        until(lambda: watching.notice)
        assert watching.notice == f"AWS spot interruption: {action} at 2026-09-18T08:22:00Z"
        asked = len(aws.asked)
        time.sleep(0.1)
    assert len(aws.asked) == asked, "it is known: nobody asks again"
    assert aws.count(200, "token") == 1 and not aws.count(401) and not log.records


def test_an_aws_token_is_renewed_before_it_ends(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "TOKEN_SECONDS", 1)
    with watch("aws", aws):
        until(lambda: aws.count(200, "token") >= 3)
    assert not aws.count(401) and min(aws.left) > 0.1


def test_an_aws_token_that_is_refused_is_renewed_at_once(aws: FakeAws) -> None:
    with watch("aws", aws) as watching:
        until(lambda: aws.count(404) >= 1)
        aws.notice = {"action": "terminate", "time": "2026-09-18T08:22:00Z"}
        aws.tokens.clear()
        until(lambda: watching.notice)
    assert aws.count(401) <= 1


# -- GCP ---------------------------------------------------------------------------------------------------------------


def test_gcp_announces(gcp: FakeGcp, log: pytest.LogCaptureFixture) -> None:
    with watch("gcp", gcp) as watching:
        until(lambda: gcp.count(200) >= 3)
        assert watching.notice is None
        gcp.preempted = True
        until(lambda: watching.notice)
    assert "GCP preemption" in watching.notice and "30 s after 20" in watching.notice and not log.records


def test_gcp_is_known_by_its_own_header(aws: FakeAws, log: pytest.LogCaptureFixture) -> None:
    aws.broken = (200, "TRUE")  # as something that answers everything
    with watch("gcp", aws) as watching:
        until(lambda: log.records)
        assert watching.notice is None


# -- Azure -------------------------------------------------------------------------------------------------------------


def test_azure_announces(azure: FakeAzure, log: pytest.LogCaptureFixture) -> None:
    with watch("azure", azure) as watching:
        until(lambda: azure.count(200, "scheduledevents") >= 3)
        assert watching.notice is None
        azure.events = [event("Freeze"), event("Preempt")]
        until(lambda: watching.notice)
    assert "Azure scheduled event: Preempt not before 20" in watching.notice
    assert azure.count(200, "name") == 1 and not log.records


ENDS = {
    "this machine": event("Preempt"),
    "among others": event("Preempt", resources=("worker_1", "WORKER_3")),
    "with an underscore": event("Preempt", resources=("_worker_3",)),
    "nobody is named": event("Preempt", resources=()),
    "far away, but for spot": event("Preempt", 86_400),
    "begun": event("Preempt", status="Started"),
    "deleted soon": event("Terminate", 60),
    "moved soon": event("Redeploy", 60),
    "a reboot that begins": event("Reboot", status="Started"),
    "a time that nobody can read": event("Reboot") | {"NotBefore": "soon"},
    "no time": event("Reboot") | {"NotBefore": None},
}
GOES_ON = {
    "another machine": event("Preempt", resources=("worker_1", "worker_33")),
    "a pause of seconds": event("Freeze"),
    "deleted later": event("Terminate", 86_400),
    "moved later": event("Redeploy", 86_400),
    "a reboot later": event("Reboot", 86_400),
}


@pytest.mark.parametrize(("events", "ends"), [(ENDS, True), (GOES_ON, False)])
def test_what_ends_a_job_on_azure(events: dict[str, dict], ends: bool) -> None:
    for case, one in events.items():
        service = spot.Azure("http://127.0.0.1:1")
        answers = {service.NAME_PATH: "worker_3", service.EVENTS_PATH: json.dumps({"Events": [one]})}
        service._http.get = lambda path, headers, answers=answers, **more: answers[path]  # type: ignore[method-assign]
        assert (service.look() is not None) == ends, case


def test_azures_first_answer_may_take_long(
    azure: FakeAzure, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spot, "READ_SECONDS", 0.2)
    with watch("azure", azure):
        until(lambda: azure.count(200, "name"))
        azure.delay = 0.6
        until(lambda: azure.count(200, "scheduledevents") >= 2)  # the first one was waited for
        assert not log.records
        until(lambda: log.records)  # the later ones were not


# -- what all share ----------------------------------------------------------------------------------------------------


def ask(url: str, method: str = "GET", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with build_opener(ProxyHandler({})).open(Request(url, method=method, headers=named), timeout=5) as response:
            return response.status
    except HTTPError as error:
        return error.code


def test_the_stand_ins_refuse_what_the_services_refuse(aws: FakeAws, gcp: FakeGcp, azure: FakeAzure) -> None:
    action = aws.url + "/latest/meta-data/spot/instance-action"
    assert ask(action) == 401 and ask(action, X_aws_ec2_metadata_token="made-up") == 401
    token = aws.url + "/latest/api/token"
    assert ask(token) == 405 and ask(token, "PUT") == 400
    assert ask(token, "PUT", X_aws_ec2_metadata_token_ttl_seconds="21601") == 400
    preempted = gcp.url + "/computeMetadata/v1/instance/preempted"
    assert ask(preempted) == 403 and ask(preempted, Metadata_Flavor="google") == 403
    events = azure.url + "/metadata/scheduledevents"
    assert ask(events + "?api-version=2020-07-01") == 400 and ask(events, Metadata="true") == 400


@pytest.mark.parametrize("kind", ["aws", "gcp", "azure"])
def test_auto_finds_the_cloud(kind: str, request: pytest.FixtureRequest, log: pytest.LogCaptureFixture) -> None:
    cloud = request.getfixturevalue(kind)
    with watch("auto", cloud) as watching:
        until(lambda: log.records)
        assert [record.getMessage() for record in log.records] == [
            f"watching for {spot.SERVICES[kind].name} notices of interruption"
        ]
        cloud.notice, cloud.preempted, cloud.events = {"action": "stop", "time": "soon"}, True, [event("Preempt")]
        assert spot.SERVICES[kind].name in str(until(lambda: watching.notice))


@pytest.mark.parametrize("how", ["nobody", "silence", "(200, '<html>welcome</html>')", "(200, '')", "(302, '')"])
def test_auto_where_there_is_no_cloud(
    how: str, gcp: FakeGcp, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spot, "DETECT_SECONDS", 0.5)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if how == "silence":
            listening.listen()
        if how.startswith("("):
            gcp.broken = ast.literal_eval(how)
        url = gcp.url if gcp.broken else f"http://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        with SpotWatch("auto", base_url=url, interval=0.01) as watching:
            assert time.monotonic() - began < 0.3, "a start does not wait for it"
            until(lambda: log.records)
            assert time.monotonic() - began < 2
    assert watching.notice is None and not watching._thread.is_alive()
    assert [record.levelname for record in log.records] == ["WARNING"] and "not watched" in log.text


@pytest.mark.parametrize("kind", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("broken", [(500, ""), (200, "{"), (200, "[]")])
def test_a_service_that_fails_is_said_once_and_asked_again(
    kind: str, broken: tuple[int, str], request: pytest.FixtureRequest, log: pytest.LogCaptureFixture
) -> None:
    cloud = request.getfixturevalue(kind)
    cloud.broken = broken
    with watch(kind, cloud) as watching:
        until(lambda: len(cloud.asked) >= 20)
        assert [record.levelname for record in log.records] == ["WARNING"]
        assert cloud.url in log.text and watching.notice is None
        cloud.broken = None
        until(lambda: len(log.records) == 2)
        assert log.records[1].getMessage().endswith("answers again")
        cloud.notice, cloud.preempted, cloud.events = {"action": "stop", "time": "soon"}, True, [event("Preempt")]
        until(lambda: watching.notice)


def test_a_service_that_comes_later(log: pytest.LogCaptureFixture) -> None:
    """As with a network that is up after the job."""
    cloud = FakeAws()
    cloud.server_close()  # its port is free now
    with SpotWatch("aws", base_url=cloud.url, interval=0.01) as watching:
        until(lambda: log.records)
        assert "ConnectionRefusedError" in log.text and "hop limit" in log.text
        cloud.socket = socket.socket()
        cloud.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        cloud.server_bind()
        cloud.server_activate()
        cloud.notice = {"action": "terminate", "time": "2026-09-18T08:22:00Z"}
        for _ in served(cloud):
            until(lambda: watching.notice)


def test_proxies_of_the_environment_are_not_asked(gcp: FakeGcp, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    gcp.preempted = True
    with watch("gcp", gcp) as watching:
        until(lambda: watching.notice)


def test_leaving_does_not_wait_for_a_service_that_hangs(aws: FakeAws) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with SpotWatch("aws", base_url=f"http://127.0.0.1:{listening.getsockname()[1]}"):
            time.sleep(0.05)
            before = time.monotonic()
        assert time.monotonic() - before < 1.5


def test_neither_guard_needs_torch() -> None:
    code = "import sys, batchgen.spot, batchgen.watchdog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
