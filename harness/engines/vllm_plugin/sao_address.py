"""Where a meeting finds its members. Both interpreters import this: vLLM's and the harness's. Standard library only."""

import socket


def facing(host: str, port: int) -> str:
    """This machine's address (IPv4) on the way to another one. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
