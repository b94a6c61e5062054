"""Upgrades of a fleet: clients and replicas of a later version beside a service of this one, and backups."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from drafter_service.replication.events import Kind, decode
from drafter_service.settings.tree import SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from tests.drafter_service.raw import batch, connected, counted, drafted, start, texts
from tests.servers import serving

ROOT = Path(__file__).parent.parent
DRILL = ROOT / "deploy" / "restore-drill.sh"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
TIMEOUT_S = 30
DRAFTING = DrafterConfig(capacity=300_000)
UNKNOWN_FIELD = bytes([0xFA, 0x7F, 3]) + b"new"
"""Field 2047, of type bytes, which no version has."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("u")
    address = f"unix:{folder}/drafter.sock"
    with serving(listen=address, drafting=DRAFTING, snapshots=SnapshotsConfig(folder / "snapshots")):
        yield address


@pytest.mark.parametrize(
    "request_message",
    [
        pb.ObserveRequest(namespace="calls", texts=texts(counted(0))),
        pb.ReportRequest(namespace="calls"),
        pb.SnapshotRequest(namespace="calls"),
        pb.ListNamespacesRequest(),
        pb.ForgetRequest(namespace="calls", older_than_s=1e9),
    ],
    ids=lambda message: type(message).__name__,
)
def test_calls_of_a_later_version_are_answered(address, request_message):
    """A call with a field that this version does not know."""
    method = type(request_message).__name__.removesuffix("Request")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/ssd.drafter.v1.DrafterService/{method}")
        assert call(request_message.SerializeToString() + UNKNOWN_FIELD, timeout=TIMEOUT_S) is not None


def test_fields_of_a_later_version_are_ignored(address):
    with connected(address) as caller:
        stream = caller.stream("later")
        request = pb.DraftRequest(step=9, starts=[start(1, [5, 6, 5, 6, 5])], batch=batch({1: ()}))
        stream.send(request.SerializeToString() + UNKNOWN_FIELD)
        response = stream.read()
        assert response.step == 9
        assert drafted(response)


def test_an_entry_of_the_shared_log_of_another_version_is_read():
    """The columns of version 1, byte by byte, with a column that a later version may add."""
    entry = {
        b"version": b"1",
        b"writer": b"replica",
        b"kinds": bytes([0]),
        b"times": struct.pack("<d", 2.5),
        b"lengths": struct.pack("<I", 3),
        b"tokens": struct.pack("<3I", 7, 8, 9),
        b"name_lengths": struct.pack("<I", 4),
        b"names": b"name",
        b"tags": struct.pack("<I", 0),
        b"column-of-a-later-version": b"1",
    }
    (event,) = decode(entry).events
    assert event[:3] == (Kind.FINISHED, 2.5, "name")
    np.testing.assert_array_equal(event.tokens, [7, 8, 9])


# --- Backups


def run_drill(address, folder, commands, *flags):
    return subprocess.run(
        ["sh", DRILL, address, folder, *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
    )


def test_the_restore_drill(socket_address, tmp_path):
    """It restores every namespace of a service that was just restarted, and reports one that cannot be restored."""
    snapshots, link = tmp_path / "snapshots", tmp_path / "link"
    link.symlink_to(snapshots.name)
    settings = {"listen": socket_address, "drafting": DRAFTING, "snapshots": SnapshotsConfig(snapshots)}
    with serving(**settings), connected(socket_address) as caller:
        caller.observe("backup", counted(0, 1000))
    with serving(**settings):
        check_drill(socket_address, link, tmp_path)


def check_drill(address, snapshots, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "ssd-drafter"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m drafter_service.commands.main "$@"\n')
    command.chmod(0o755)
    flags = ["--capacity", "5k", "--log", "redis://127.0.0.1:1", "--metrics", "unusable"]
    done = run_drill(address, snapshots, commands, *flags)
    assert done.returncode == 0, done.stderr
    assert "restored all namespaces" in done.stdout
    rows = [line.split()[:3] for line in done.stdout.splitlines()]
    assert ["backup", "1,001", "5,000"] in rows, done.stdout

    damaged = snapshots / "damaged"
    damaged.mkdir()
    (damaged / "corpus.ssd").write_bytes(b"SSD\0 damaged")
    done = run_drill(address, snapshots, commands)
    assert done.returncode == 1
    assert "could not be restored" in done.stderr
    assert "damaged/corpus.refused" in done.stderr


def test_the_drill_is_documented():
    assert "deploy/restore-drill.sh unix:" in OPERATIONS


def test_restored_files_have_the_owner_of_the_folder(tmp_path):
    """The documented commands; with DynamicUser of systemd the folder is a link, and its owner has no name."""
    folder, backup = tmp_path / "private" / "ssd-drafter", tmp_path / "backup"
    for parent, name in ((folder, "old"), (backup, "new")):
        (parent / name).mkdir(parents=True)
        (parent / name / "corpus.ssd").touch(0o600)
    (tmp_path / "ssd-drafter").symlink_to("private/ssd-drafter")
    owner = 61184 if os.geteuid() == 0 else os.geteuid()
    os.chown(folder, owner, -1)
    lines = re.findall("^(?:rm|chown) .*", OPERATIONS, re.MULTILINE)
    commands = "\n".join(lines).replace("/var/lib/", f"{tmp_path}/").replace("/backup/ssd-drafter", str(backup))
    subprocess.run(["sh", "-euc", commands], check=True, timeout=30)
    restored = sorted(folder.rglob("*"))
    assert restored == [folder / "new", folder / "new" / "corpus.ssd"]
    assert {path.stat().st_uid for path in restored} == {owner}
