"""Runs inside a sandbox (any Python >= 3.6, standard library only): one command, and a door to the model for it.

Listens on the sandbox's own loopback, runs the command with the address in its environment, and carries the bytes of its
connections over standard input and output as frames: channel (4 bytes), length (4 bytes), data. So a sandbox without any
network has exactly one way out, and it leads to one episode's model.

    channel 0   outwards: JSON of the end, {"exit": code}, then nothing more
    channel 1   outwards: what the command printed
    channel 2.. both ways: a connection; an empty frame ends its direction
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

HEADER = struct.Struct(">II")
sending = threading.Lock()
connections: "dict[int, socket.socket]" = {}


def send(channel: int, data: bytes) -> None:
    with sending:
        sys.stdout.buffer.write(HEADER.pack(channel, len(data)) + data)
        sys.stdout.buffer.flush()


def outwards(channel: int, connection: socket.socket) -> None:
    try:
        data = connection.recv(65536)
        while data:
            send(channel, data)
            data = connection.recv(65536)
    except OSError:
        pass  # the client has gone; the empty frame says so
    send(channel, b"")


def accept(server: socket.socket) -> None:
    channel = 2
    while True:
        connection, _ = server.accept()
        connections[channel] = connection
        threading.Thread(target=outwards, args=(channel, connection), daemon=True).start()
        channel += 1


def printed(pipe: int) -> None:
    data = os.read(pipe, 65536)
    while data:
        send(1, data)
        data = os.read(pipe, 65536)


def exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sys.stdin.buffer.read(size - len(data))
        if not more:
            return b""
        data += more
    return data


def inwards(child: "subprocess.Popen[bytes]") -> None:
    while True:
        header = exactly(HEADER.size)
        if not header:  # the harness has let go: so must the command
            os.killpg(child.pid, signal.SIGKILL)
            os._exit(1)
        channel, size = HEADER.unpack(header)
        data = exactly(size)
        connection = connections.get(channel)
        try:
            if connection is not None and data:
                connection.sendall(data)
            elif connection is not None:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            connections.pop(channel)


def main() -> None:
    options = json.loads(sys.argv[1])
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(64)
    threading.Thread(target=accept, args=(server,), daemon=True).start()
    address = f"127.0.0.1:{server.getsockname()[1]}"
    env = {name: value.replace("{gateway}", address) for name, value in options["env"].items()}
    child = subprocess.Popen(
        ["bash", "-c", options["command"]],
        env=dict(os.environ, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    threading.Thread(target=inwards, args=(child,), daemon=True).start()
    assert child.stdout is not None
    printer = threading.Thread(target=printed, args=(child.stdout.fileno(),), daemon=True)
    printer.start()
    code = child.wait()
    printer.join(1)  # what it has left running may hold the pipe open
    send(0, json.dumps({"exit": code}).encode())
    os._exit(0)


main()
