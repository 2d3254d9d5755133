"""Ports for the jobs that tests start."""

import socket


def free_port() -> int:
    """A TCP port of this machine that is free right now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
