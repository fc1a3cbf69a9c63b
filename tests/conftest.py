"""What several test files share."""

import socket

import pytest


@pytest.fixture
def free_port():
    """A TCP port of this machine that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
