"""The view of a job as a page on the loopback interface.

Note [Who may see the page]
    Every user of a host can connect to its loopback interface, and so can any page in a browser.
    The page itself holds nothing about the job. Its requests carry a token, which is in the
    fragment of the link that the command prints: browsers do not send fragments. Requests under
    another host name are refused, which stops pages whose name was pointed at this host.
"""

from __future__ import annotations

import hmac
import http.server
import importlib.resources
import json
import secrets
import threading
from http import HTTPStatus
from typing import Any, Self, cast

from replicax.foundation import errors
from replicax.top import table
from replicax.top.terminal import Sampling
from replicax.top.view import Sampler, View

# The seconds that a connection may take for a request.
_REQUEST_S = 5.0
_MOST_BODY_BYTES = 4096
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server:
    """Serves the page until it is closed.

    Args:
      sampler: Looks at the job, shows stacks, and kills.
      port: The port on 127.0.0.1; 0 takes any.

    Raises:
      AddressInUseError: Another process listens at the port.
    """

    def __init__(self, sampler: Sampler, port: int = 0) -> None:
        self.sampler = sampler
        self.token = secrets.token_urlsafe(24)
        page = importlib.resources.files("replicax.top").joinpath("page.html")
        self.page = page.read_text("utf-8")
        try:
            self._server = _HttpServer(self, port)
        except OSError as error:
            raise errors.AddressInUseError(
                f"Port {port} of 127.0.0.1 must be free",
                f"the page cannot listen there ({error.strerror})",
                "Choose another port; port 0 takes any.",
            ) from error
        self.port: int = self._server.server_address[1]
        self.hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        self._sampling = Sampling(sampler)

    @property
    def url(self) -> str:
        """The link to the page, with its token."""
        return f"http://127.0.0.1:{self.port}/#{self.token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self) -> None:
        """Serves in this thread, until `close` in another thread or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return

    def start(self) -> threading.Thread:
        """Serves in a thread of its own, until `close`."""
        thread = threading.Thread(target=self.serve, name="replicax-top-web", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stops serving. Idempotent; only while `serve` runs in another thread, or has returned."""
        self._server.stop()
        self._sampling.close()

    @property
    def view(self) -> View:
        """The last view."""
        return self._sampling.view


def to_json(view: View) -> dict[str, Any]:
    """Returns what the page shows: texts, in the order and the words of the terminal."""
    shown = table.columns(view)
    return {
        "title": table.title_parts(view),
        "columns": [title for title, _ in shown],
        "rows": [
            {
                "task": row.task,
                "state": row.state,
                "style": table.state_style(row),
                "cells": [text(row) for _, text in shown],
                "can_kill": row.pid is not None,
            }
            for row in view.rows
        ],
        "notes": [f"{row.task}: {row.state}: {row.reason}" for row in view.rows if row.reason]
        + list(view.waits),
    }


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # Threads of requests end by themselves within the time of a request.
    block_on_close = False

    def __init__(self, owner: Server, port: int) -> None:
        self.owner = owner
        self._is_serving = False
        super().__init__(("127.0.0.1", port), _Handler)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        self._is_serving = True
        super().serve_forever(poll_interval)

    def stop(self) -> None:
        if self._is_serving:
            self._is_serving = False
            self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version = "replicax"
    sys_version = ""

    @property
    def _owner(self) -> Server:
        return cast(_HttpServer, self.server).owner

    def log_message(self, format: str, *args: object) -> None:
        """Writes no log: the terminal shows the link."""

    def do_GET(self) -> None:
        """Sends the page, or the view."""
        if not self._is_for_this_host():
            return
        if self.path == "/":
            self._send_page()
        elif self.path == "/api/view" and self._is_allowed():
            self._send_json(to_json(self._owner.view))
        elif self.path != "/api/view":
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        """Sends the stack of a task, or kills it."""
        if not self._is_for_this_host() or not self._is_allowed():
            return
        task = self._task()
        row = None if task is None else self._owner.view.find(task)
        if row is None:
            self._refuse(HTTPStatus.BAD_REQUEST, "no such task")
            return
        sampler = self._owner.sampler
        try:
            if self.path == "/api/stack":
                self._send_json({"text": sampler.stack(row)})
            elif self.path == "/api/kill":
                pid = sampler.kill(row)
                self._send_json({"text": f"Killed {row.task} (process {pid})."})
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "no such request")
        except errors.DistributeError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))

    def _task(self) -> str | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MOST_BODY_BYTES:
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return None
        task = body.get("task") if isinstance(body, dict) else None
        return task if isinstance(task, str) else None

    def _is_for_this_host(self) -> bool:
        if self.headers.get("Host") in self._owner.hosts:
            return True
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this is the loopback interface")
        return False

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, f"Bearer {self._owner.token}".encode()):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "the token of the link is missing or wrong")
        return False

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        page = self._owner.page.replace("{{nonce}}", nonce).encode()
        self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", policy)

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), "application/json")
        self.close_connection = True

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
