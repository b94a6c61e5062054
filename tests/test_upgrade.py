"""Upgrades of a fleet: services, engines, snapshots and replicas of the last release beside those of this version.

`protos/baseline.binpb` has the protocol of the last release. Messages that are reduced to it are what a process of the
last release sends, and what it understands.
"""

import json
import os
import struct
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.cluster.last_release import Release, listen, reduced
from drafter_service.client import DrafterClient
from drafter_service.replication.events import Finished, decode
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack, read_drafts
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import Section, read_sections, write_sections
from ssd.types import Progress
from tests.drafter_service.raw import DRAFT, batch, connected, counted, eventually, finish, hello, start, texts
from tests.servers import served
from tests.strategies import array

ROOT = Path(__file__).parent.parent
DRILL = ROOT / "deploy" / "restore-drill.sh"
TIMEOUT_S = 30
UNKNOWN_FIELD = bytes([0xFA, 0x7F, 3]) + b"new"
"""Field 2047, of type bytes, which no version has."""


RELEASE = Release(ROOT / "protos" / "baseline.binpb")
last_release = RELEASE.message
OLD_REQUEST, OLD_RESPONSE = last_release("DraftRequest"), last_release("DraftResponse")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("u")


@pytest.fixture(scope="module")
def address(folder):
    address = f"unix:{folder}/drafter.sock"
    with served("--listen", address, "--capacity", "300k", "--snapshot-folder", str(folder / "snapshots")):
        yield address


def test_this_version_has_fields_that_the_last_release_does_not_know():
    new = pb.Start(sequence_id=1, hints=pack(array([1]), "u4"), shadow=True).SerializeToString()
    assert len(reduced(last_release("Start"), new)) < len(new)


# --- Engines of the last release


def test_an_engine_of_the_last_release_gets_drafts(address):
    """Every message is made and read by classes of the last release, and the text is learned."""

    def requests():
        for number in range(2):
            first = pb.DraftRequest(step=1, hello=hello("old"), starts=[start(number, counted(0, 10))])
            first.batch.CopyFrom(batch({number: ()}))
            if number:
                first.ClearField("hello")
            yield reduced(OLD_REQUEST, first.SerializeToString())
            done = finish(number, counted(10, 30), steps=30)
            yield reduced(OLD_REQUEST, pb.DraftRequest(step=2, finishes=[done]).SerializeToString())
            eventually(lambda: is_learned(address, "old"))

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(DRAFT, response_deserializer=OLD_RESPONSE.FromString)
        responses = list(call(requests(), timeout=TIMEOUT_S))
    assert responses[0].welcome.protocol == 3
    sizes = [len(response.drafts.tokens) for response in responses]
    assert sizes[0] == 0 < sizes[2]
    assert not any(response.HasField("error") for response in responses)


def is_learned(address, name):
    """Return whether a namespace exists, and drafts from what it has learned."""
    with connected(address) as caller:
        namespaces = json.loads(caller.call("Report").json)["namespaces"]
    corpora = [each["corpus"] for each in namespaces if each["name"] == name]
    return any(corpus["learned_tokens"] > 0 == corpus["waiting_tokens"] for corpus in corpora)


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
def test_calls_of_the_last_release_are_answered(address, request_message):
    """A call of the last release, and one of a later version with a field that nobody knows."""
    method = type(request_message).__name__.removesuffix("Request")
    old = reduced(last_release(f"{method}Request"), request_message.SerializeToString())
    response = last_release(f"{method}Response")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/ssd.drafter.v1.DrafterService/{method}", response_deserializer=response.FromString
        )
        for data in (old, request_message.SerializeToString() + UNKNOWN_FIELD):
            assert call(data, timeout=TIMEOUT_S) is not None


def test_what_the_last_release_sends_in_removed_fields_is_ignored(address):
    """The drafting policy of a namespace, and texts in a report."""
    first = OLD_REQUEST(step=1, hello={"protocol": 3, "namespace": "removed", "policy": "classic"})
    with connected(address) as caller:
        stream = caller.stream()
        answer = stream.exchange(first.SerializeToString())
        welcome = last_release("Welcome").FromString(answer.welcome.SerializeToString())
        assert (welcome.namespace, welcome.policy) == ("removed", "")
        # The drafter of that policy would not draft from the running request.
        assert stream.draft(1, starts=[start(1, [5, 6, 5])], limit=2) == [6, 5]
        ask = caller.channel.unary_unary(
            "/ssd.drafter.v1.DrafterService/Report", response_deserializer=pb.ReportResponse.FromString
        )
        request = last_release("ReportRequest")(namespace="removed", passages=True)
        [reported] = json.loads(ask(request.SerializeToString(), timeout=TIMEOUT_S).json)["namespaces"]
        assert "passages" not in reported


def test_fields_of_a_later_version_are_ignored(address):
    with connected(address) as caller:
        stream = caller.stream("later")
        request = pb.DraftRequest(step=9, starts=[start(1, [5, 6, 5, 6, 5])], batch=batch({1: ()}))
        stream.send(request.SerializeToString() + UNKNOWN_FIELD)
        response = stream.read()
        assert response.step == 9
        assert len(read_drafts(response.drafts, 1).tokens)


# --- A service of the last release


@contextmanager
def service_of_the_last_release(path, address):
    """Yield the address of a service that understands and answers only what the last release does."""
    listener = listen(f"{path}.steps")
    service = f"{address.removeprefix('unix:')}.steps"
    threading.Thread(target=RELEASE.serve, args=(listener, service), daemon=True).start()
    with closing(listener):
        yield f"unix:{path}"


@pytest.mark.parametrize("shadow", [False, True])
def test_an_engine_of_this_version_works_with_a_service_of_the_last_release(folder, address, shadow):
    """Without shadow mode, the service answers with drafts, which the client withholds."""
    name = f"new-{shadow}"
    with (
        service_of_the_last_release(folder / name, address) as old,
        DrafterClient(old, namespace=name, deadline_s=TIMEOUT_S, shadow=shadow) as client,
    ):
        client.start(1, array([5, 6, 7, 5, 6, 7, 5]), hints=array([7, 8]))
        draft = client.draft(Progress.of_one(1, array([]), max_draft=4))
        assert (len(draft.tokens) == 0) == shadow
        client.finish(1, array([6, 7, 5, 6]), steps=4)
        eventually(lambda: is_learned(address, name))
        assert client.counters.malformed == 0


# --- Data of the last release


def test_a_snapshot_of_the_last_release_is_restored(folder, address):
    """It has no capacity; its description has no counters, and the policy of a drafter that services no longer have."""
    namespace = folder / "snapshots" / "stored"
    namespace.mkdir(parents=True)
    corpus = Corpus(300_000)
    corpus.append(array(counted(0)))
    whole = folder / "whole.ssd"
    snapshot.save(corpus, whole)
    corpus.close()
    sections = {**read_sections(whole)}
    sections["facts"] = sections["facts"][: snapshot.CAPACITY]
    write_sections(
        namespace / "corpus.ssd", [Section(name, array.dtype.str, [array]) for name, array in sections.items()]
    )
    (namespace / "namespace.json").write_text(
        json.dumps({"name": "stored", "model": {"name": "m"}, "policy": "classic"})
    )
    with connected(address) as caller:
        assert caller.probe("stored", counted(0)[:8], limit=2) == [8, 9]


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
        b"column-of-a-later-version": b"1",
    }
    (event,) = decode(entry).events
    assert isinstance(event, Finished)
    assert (event.request, event.time) == ("name", 2.5)
    np.testing.assert_array_equal(event.tokens, [7, 8, 9])


# --- Backups


def run_drill(address, folder, commands):
    return subprocess.run(
        ["sh", DRILL, address, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
    )


def test_the_restore_drill(folder, address, tmp_path):
    """It restores every namespace of a running service, and reports one that cannot be restored."""
    with connected(address) as caller:
        caller.observe("backup", counted(0, 1000))
        caller.call("Snapshot")
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "ssd-drafter"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m drafter_service.commands.main "$@"\n')
    command.chmod(0o755)
    done = run_drill(address, folder / "snapshots", commands)
    assert done.returncode == 0, done.stderr
    assert "restored all namespaces" in done.stdout
    assert any(line.split()[:2] == ["backup", "1,001"] for line in done.stdout.splitlines()), done.stdout

    damaged = folder / "snapshots" / "damaged"
    damaged.mkdir()
    (damaged / "corpus.ssd").write_bytes(b"SSD\0 damaged")
    done = run_drill(address, folder / "snapshots", commands)
    assert done.returncode == 1
    assert "could not be restored" in done.stderr
    assert "damaged/corpus.refused" in done.stderr


def test_the_drill_is_documented():
    assert "deploy/restore-drill.sh unix:" in (ROOT / "docs" / "operations.md").read_text()
