"""A sidecar of the last release, as engines see it: `python -m benchmarks.cluster.last_release BASELINE PATH SERVICE`.

It is a proxy on the step socket of a Unix socket's PATH that forwards to the sidecar at SERVICE and removes from all
messages the fields that the last release did not have. The file BASELINE, `protos/baseline.binpb`, has that protocol.
"""

from __future__ import annotations

import argparse
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from drafter_service.stubs import drafter_pb2 as pb

LAST_FRAME = 1 << 31
"""Flag in the length of the last frame of a direction, which is not a message."""
HEAD_BYTES = 15
"""Bytes before the first frame of an engine, whose first frame is no message either."""


class Release:
    """The messages of a release."""

    def __init__(self, baseline: Path) -> None:
        """baseline: file with the descriptors of its protocol."""
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(baseline.read_bytes()).file:
            self._pool.Add(file)

    def message(self, name: str) -> Any:
        """Return a class of messages."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{pb.DESCRIPTOR.package}.{name}"))

    def serve(self, listener: socket.socket, service: str) -> None:
        """Forward connections to the step socket at the path `service`, until the listener is closed."""
        while True:
            try:
                engine, _ = listener.accept()
            except OSError:
                return
            sidecar = socket.socket(socket.AF_UNIX)
            try:
                sidecar.connect(service)
            except OSError:
                engine.close()
                continue
            requests, responses = self.message("DraftRequest"), self.message("DraftResponse")
            for arguments in ((engine, sidecar, requests, HEAD_BYTES, 1), (sidecar, engine, responses, 0, 0)):
                threading.Thread(target=forward, args=arguments, daemon=True).start()


def reduced(kind: Any, data: bytes) -> bytes:
    """Return a message as a process of the release understands it."""
    message = kind.FromString(data)
    message.DiscardUnknownFields()
    return message.SerializeToString()


def forward(source: socket.socket, target: socket.socket, kind: Any, head: int, unchanged: int) -> None:
    """Forward `head` bytes and the first `unchanged` frames as they are, and frames with messages reduced to `kind`."""
    reader = source.makefile("rb")
    target.sendall(reader.read(head))
    while length := reader.read(4):
        size = struct.unpack("<I", length)[0]
        data = reader.read(size % LAST_FRAME)
        if unchanged or size >= LAST_FRAME:
            unchanged = max(0, unchanged - 1)
        else:
            data = reduced(kind, data)
            size = len(data)
        target.sendall(struct.pack("<I", size) + data)
    target.shutdown(socket.SHUT_WR)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path; what was there is replaced."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("path")
    parser.add_argument("service")
    options = parser.parse_args()
    Release(options.baseline).serve(listen(f"{options.path}.steps"), f"{options.service}.steps")


if __name__ == "__main__":
    main()
