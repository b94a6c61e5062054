"""A sidecar whose snapshot folder fails on demand, as a disk does: python -m ... FOLDER CONTROL serve OPTION...

The file CONTROL has the name of an error, such as "EIO 0.3", with the share of calls that fail; "STALL 1" for calls
that do not return before the file changes; or nothing. Limits of time are short.
"""

import errno
import io
import os
import random
import sys
import time

from drafter_service.commands.main import cli
from drafter_service.server import namespaces, server

DISK_LIMIT_S = 0.3
"""See `namespaces.DISK_LIMIT_S`."""
IDLE_S = 0.5

_open, _os_open, _readlink = io.open, os.open, os.readlink


class Faults:
    """Faults of calls with a path, or a descriptor, in the folder."""

    def __init__(self, folder, control):
        self._folder, self._control, self._rng = folder, control, random.Random(0)

    def concern(self, place):
        """Return whether a path or a descriptor is in the folder."""
        if isinstance(place, int):
            place = _readlink(f"/proc/self/fd/{place}")
        return isinstance(place, str | os.PathLike) and os.fspath(place).startswith(self._folder)

    def meet(self):
        """Raise the error that the control file demands, or wait while it demands that calls stall."""
        while True:
            with _open(self._control) as file:
                kind, share = [*file.read().split(), "", "0"][:2]
            if self._rng.random() >= float(share):
                return
            if kind != "STALL":
                code = getattr(errno, kind)
                raise OSError(code, os.strerror(code))
            time.sleep(0.002)

    def before(self, function):
        """Return a function that may fail before it is called, as its first argument says."""

        def call(place=".", *arguments, **named):
            if self.concern(place):
                self.meet()
            return function(place, *arguments, **named)

        return call

    def opened(self, place, *arguments, **named):
        """Open a file, whose later calls may fail, too."""
        if not self.concern(place):
            return _open(place, *arguments, **named)
        if not isinstance(place, int):
            self.meet()
        return File(self, _open(place, *arguments, **named))


class File:
    """An open file whose calls may fail."""

    def __init__(self, faults, file):
        self._faults, self._file = faults, file

    def __getattr__(self, name):
        if name in ("read", "readinto", "write", "flush"):
            self._faults.meet()
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def break_folder(folder, control):
    faults = Faults(folder, control)
    io.open = faults.opened
    for name in ("open", "stat", "listdir", "scandir", "fsync", "replace", "rename", "mkdir"):
        setattr(os, name, faults.before(getattr(os, name)))
    namespaces.DISK_LIMIT_S = DISK_LIMIT_S
    namespaces.DISK_BYTES_PER_S = 1e12
    server.IDLE_S = IDLE_S


if __name__ == "__main__":
    break_folder(*sys.argv[1:3])
    cli(sys.argv[3:])
