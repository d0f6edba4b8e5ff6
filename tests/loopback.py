"""A loopback of a command's own, for what counts all bytes there: other tests' would count, too."""

from __future__ import annotations

import pytest

from commlib.emulation.netns import check_requirements

#: What emulated hosts lack here; asked once, as that makes a namespace.
MISSING = check_requirements()

#: Put before a command.
OWN_LOOPBACK = ("unshare", "--net", "/bin/sh", "-c", 'ip link set lo up && exec "$@"', "sh")
needs_own_loopback = pytest.mark.skipif(bool(MISSING), reason="a loopback of its own needs " + "; ".join(MISSING))
