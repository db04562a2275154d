"""Watches for the notice that the cloud is about to take this machine away (AWS, GCP and Azure spot).

What counts is what surely ends the machine. An AWS rebalance recommendation does not: it may never be followed by an
interruption, and a job started again on the same machine would find it still there. GCP's `maintenance-event` comes up
to an hour ahead on machines with a GPU and would idle them for that long; the shutdown itself sends SIGTERM in time.
"""

from __future__ import annotations

import http.client
import json
import logging
import queue
import re
import threading
import time
from contextlib import AbstractContextManager
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

Kind = Literal["aws", "gcp", "azure", "auto"]

BASE_URL = "http://169.254.169.254"  # the same link-local address in all three clouds
INTERVAL_SECONDS = 2.0  # GCP and Azure give 30 s of notice, of which a drain takes up to 20
CONNECT_SECONDS = READ_SECONDS = 2.0
DETECT_SECONDS = 2.0
MAX_ANSWER = 1 << 20
TOKEN_SECONDS = 21_600  # of an AWS token; the most there is
GCP_HEADERS = {"Metadata-Flavor": "Google"}
AZURE_HEADERS = {"Metadata": "true"}
AZURE_FIRST_READ_SECONDS = 130.0  # the first request switches scheduled events on, which takes up to two minutes
AZURE_LEAD = timedelta(minutes=2)  # reboots are announced 10 to 15 minutes ahead, and the time before is paid for
FAILURES_BEFORE_WARNING = 3


class NoAnswerError(Exception):
    """A metadata service that does not answer, or not as documented."""


class _Http:
    """Plain requests to one address: short timeouts, no proxy, no redirect."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._address = urlsplit(base_url)

    def ask(
        self, method: str, path: str, headers: dict[str, str], *, read_seconds: float = READ_SECONDS
    ) -> tuple[int, http.client.HTTPMessage, str]:
        assert self._address.hostname is not None, self.base_url
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(read_seconds)
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read(MAX_ANSWER).decode("utf-8", "replace").strip()
        except http.client.HTTPException as error:
            raise NoAnswerError(f"{method} {path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str], *, read_seconds: float = READ_SECONDS) -> str:
        status, _, body = self.ask("GET", path, headers, read_seconds=read_seconds)
        if status != 200:
            raise NoAnswerError(f"GET {path}: status {status}")
        return body


class Aws:
    """EC2's instance metadata, version 2: a token first, then the answers. 404 says that nothing is announced."""

    name = "AWS"
    TOKEN_PATH = "/latest/api/token"
    ACTION_PATH = "/latest/meta-data/spot/instance-action"

    def __init__(self, base_url: str) -> None:
        self._http = _Http(base_url)
        self._token: str | None = None
        self._renew_at = 0.0

    def identify(self) -> None:
        self._renew()

    def look(self) -> str | None:
        if self._token is None or time.monotonic() >= self._renew_at:
            self._renew()
        status, body = self._action()
        if status == 401:  # the token has ended early: a machine that slept, or a service that was started again
            self._renew()
            status, body = self._action()
        if status == 404:
            return None
        if status != 200:
            raise NoAnswerError(f"GET {self.ACTION_PATH}: status {status}")
        notice = json.loads(body)
        return f"AWS spot interruption: {notice['action']} at {notice['time']}"

    def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        asked = time.monotonic()
        status, _, token = self._http.ask("PUT", self.TOKEN_PATH, headers)
        if status != 200 or not re.fullmatch(r"[\w+/=-]+", token):
            raise NoAnswerError(f"PUT {self.TOKEN_PATH}: status {status}")
        self._token, self._renew_at = token, asked + TOKEN_SECONDS / 2

    def _action(self) -> tuple[int, str]:
        assert self._token is not None
        status, _, body = self._http.ask("GET", self.ACTION_PATH, {"X-aws-ec2-metadata-token": self._token})
        return status, body


class Gcp:
    """Compute Engine's metadata server. Its notice has no time: the machine ends 30 s after it."""

    name = "GCP"
    PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"

    def __init__(self, base_url: str) -> None:
        self._http = _Http(base_url)

    def identify(self) -> None:
        self._preempted()

    def look(self) -> str | None:
        if not self._preempted():
            return None
        seen = datetime.now(timezone.utc)
        return f"GCP preemption: the machine ends about 30 s after {seen.isoformat(timespec='seconds')}"

    def _preempted(self) -> bool:
        status, headers, body = self._http.ask("GET", self.PREEMPTED_PATH, GCP_HEADERS)
        if status != 200 or headers.get("Metadata-Flavor") != "Google" or body not in ("TRUE", "FALSE"):
            raise NoAnswerError(f"GET {self.PREEMPTED_PATH}: status {status}, answer {body[:80]!r}")
        return body == "TRUE"


class Azure:
    """Azure's scheduled events. They name the machines they are for: others of the same scale set can be among them.

    Preempt ends a job at once, what reboots, moves or deletes the machine shortly before its time. Freeze is a pause
    of seconds, which a job outlives.
    """

    name = "Azure"
    NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
    AT_ONCE = frozenset({"Preempt"})
    WHEN_NEAR = frozenset({"Reboot", "Redeploy", "Terminate"})

    def __init__(self, base_url: str) -> None:
        self._http = _Http(base_url)
        self._machine: str | None = None
        self._enabled = False

    def identify(self) -> None:
        name = self._http.get(self.NAME_PATH, AZURE_HEADERS)
        if not re.fullmatch(r"[\w.-]+", name):
            raise NoAnswerError(f"GET {self.NAME_PATH}: {name[:80]!r} is no machine's name")
        self._machine = name

    def look(self) -> str | None:
        if self._machine is None:
            self.identify()
        wait = READ_SECONDS if self._enabled else AZURE_FIRST_READ_SECONDS
        events = json.loads(self._http.get(self.EVENTS_PATH, AZURE_HEADERS, read_seconds=wait))["Events"]
        self._enabled = True
        for event in events:
            kind, begins = event["EventType"], _time(event.get("NotBefore") or "")
            started = event.get("EventStatus") == "Started"
            near = started or begins is None or begins - datetime.now(timezone.utc) <= AZURE_LEAD
            if self._is_for_us(event) and (kind in self.AT_ONCE or (kind in self.WHEN_NEAR and near)):
                when = f"not before {begins.isoformat(timespec='seconds')}" if begins else "begins now"
                return f"Azure scheduled event: {kind} {when}"
        return None

    def _is_for_us(self, event: dict[str, Any]) -> bool:
        """By name, without regard to case or a leading underscore. An event that names nobody is taken for ours: a
        needless restart is cheaper than lost work."""
        assert self._machine is not None
        machines = {str(name).casefold().lstrip("_") for name in event.get("Resources") or []}
        return not machines or self._machine.casefold().lstrip("_") in machines


def _time(text: str) -> datetime | None:
    """The time of an event; None where it has begun, or where it is written as nobody expected."""
    try:
        found = parsedate_to_datetime(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


# each has identify(), which returns where the service is this cloud's, and look(), which says what is announced; both
# raise where it is not there
Service = Aws | Gcp | Azure
SERVICES: dict[str, type[Service]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class SpotWatch(AbstractContextManager["SpotWatch"]):
    """Asks the machine's metadata service now and then, from a thread of its own; `notice` says what it announced.

    Nothing here ends or delays a job: a service that is not there is said once, and asked again.
    """

    def __init__(self, kind: Kind, *, base_url: str | None = None, interval: float = INTERVAL_SECONDS) -> None:
        self._kind, self._base_url, self._interval = kind, base_url or BASE_URL, interval
        self._notice: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spot-watch", daemon=True)

    @property
    def notice(self) -> str | None:
        """What was announced and until when; None as long as nothing was. It stays once it is there."""
        return self._notice

    def __enter__(self) -> SpotWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(timeout=0.5)  # it may wait for an answer, and is a daemon

    def _run(self) -> None:
        service = self._detected() if self._kind == "auto" else SERVICES[self._kind](self._base_url)
        if service is not None:
            self._watch(service)

    def _watch(self, service: Service) -> None:
        failures = 0
        while not self._end.is_set():
            try:
                self._notice = service.look()
            except Exception as error:  # whatever it answers, the job is not to suffer
                failures += 1
                if failures == FAILURES_BEFORE_WARNING:
                    self._warn(service, error)
            else:
                if failures >= FAILURES_BEFORE_WARNING:
                    logger.info("the %s metadata service answers again", service.name)
                failures = 0
            if self._notice is not None:
                return
            self._end.wait(self._interval)

    def _warn(self, service: Service, error: Exception) -> None:
        hint = ". In a container it needs a hop limit of 2 (HttpPutResponseHopLimit)" if service.name == "AWS" else ""
        logger.warning(
            "the %s metadata service at %s does not answer as expected (%s: %s): an interruption of this machine goes "
            "unnoticed until it does; trying on%s",
            service.name,
            self._base_url,
            type(error).__name__,
            error,
            hint,
        )

    def _detected(self) -> Service | None:
        """The cloud that this machine is in. All are asked at once, none for longer than the bound."""
        found: queue.Queue[Service] = queue.Queue()

        def ask(service: Service) -> None:
            try:
                service.identify()
            except Exception:
                return
            found.put(service)

        for kind in SERVICES.values():
            threading.Thread(target=ask, args=(kind(self._base_url),), name="spot-detect", daemon=True).start()
        try:
            service = found.get(timeout=DETECT_SECONDS)
        except queue.Empty:
            logger.warning(
                "--spot auto: no metadata service of AWS, GCP or Azure answers at %s; notices of interruption are not "
                "watched. Name the cloud, --spot aws for example, to go on trying",
                self._base_url,
            )
            return None
        logger.info("watching for %s notices of interruption", service.name)
        return service


__all__ = ["Kind", "SpotWatch"]
