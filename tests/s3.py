"""An S3 server on 127.0.0.1 that can be late, break off or refuse."""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ENV = {
    "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Server:
    """moto's S3 behind `fault(method, path)`, which says what happens to a request: None (it is answered), "denied",
    "busy" (503), "half" (half of the object, as if it were all), "cut" (the connection breaks off), or a number of
    seconds to wait. requests: those so far, e.g. ("GET", "/bucket/folder/file")."""

    def __init__(self):
        self.fault: Callable[[str, str], str | float | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.http = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.http.daemon_threads = True
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def _answer(self, environ: dict, start: Callable) -> Iterator[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        fault = self.fault(method, path)
        if fault in ("denied", "busy"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("403 Forbidden" if fault == "denied" else "503 Slow Down", [("Content-Type", "application/xml")])
            return [DENIED if fault == "denied" else DENIED.replace(b"AccessDenied", b"SlowDown")]
        if isinstance(fault, float):
            time.sleep(fault)
        if fault not in ("half", "cut"):
            return self.moto(environ, start)
        kept: list = []
        body = b"".join(self.moto(environ, lambda *given: kept.extend(given)))
        short = body[: len(body) // 2]
        length = str(len(short if fault == "half" else body))
        headers = [
            (name, value) for name, value in kept[1] if not name.lower().startswith(("content-l", "x-amz-check"))
        ]
        start(kept[0], [*headers, ("Content-Length", length)])
        return [short]

    def only(self, fault: str | float, part: str, method: str = "GET", times: int = 10**9) -> None:
        """Give `fault` to the first `times` requests whose path contains `part`."""
        left = iter(range(times))
        self.fault = lambda verb, path: (
            fault if verb == method and part in path and next(left, None) is not None else None
        )

    def got(self, part: str) -> int:
        """How often objects were read whose path contains `part`."""
        return sum(method == "GET" and part in path for method, path in self.requests)


@contextmanager
def served() -> Iterator[Server]:
    """A server with a bucket; this process and those that it starts find it by their environment."""
    import boto3

    server = Server()
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # they keep the address of an earlier server
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENV | {"AWS_ENDPOINT_URL": server.url}).items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield server
    server.http.shutdown()


def new_folder() -> str:
    """The URL of an empty folder."""
    return f"s3://bucket/{uuid.uuid4().hex}"


def environment() -> dict[str, str]:
    """The variables by which another process finds the server."""
    return {name: os.environ[name] for name in (*ENV, "AWS_ENDPOINT_URL")}
