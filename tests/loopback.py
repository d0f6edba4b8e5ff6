"""A separate loopback for a command, for tests that count all bytes on it: those of other tests would count, too."""

from __future__ import annotations

import pytest

from commlib.emulation.netns import check_requirements

#: Missing requirements of emulated hosts; checked once, since that makes a namespace.
MISSING = check_requirements()

#: Put before a command.
OWN_LOOPBACK = ("unshare", "--net", "/bin/sh", "-c", 'ip link set lo up && exec "$@"', "sh")
needs_own_loopback = pytest.mark.skipif(bool(MISSING), reason="a loopback of its own needs " + "; ".join(MISSING))
