"""Commands in error messages that install missing packages, or commlib again.

They work from a checkout and from a wheel: they name packages, not an extra of commlib, which is on no package index.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from commlib.version import __version__

#: The name of the distribution. On the Python Package Index, `commlib` is another project.
DISTRIBUTION = "commlib-torch"

#: The packages of the extras that error messages advise to install, as in pyproject.toml.
EXTRAS = {
    "plot": ["matplotlib>=3.8"],
    "cuda12": ["cupy-cuda12x>=14", "nvidia-cuda-nvrtc-cu12"],
    "cuda13": ["cupy-cuda13x>=14", "nvidia-cuda-nvrtc>=13,<14"],
}


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"pip install {shlex.join(EXTRAS[extra])}"


def reinstall() -> str:
    """Return the command that installs commlib again, without its requirements: in this checkout, or from the wheel."""
    root = Path(__file__).parents[1]
    is_checkout = (root / "pyproject.toml").is_file()
    source = (
        f"--editable {shlex.quote(str(root))}"
        if is_checkout
        else f"{DISTRIBUTION.replace('-', '_')}-{__version__}-*.whl"
    )
    return f"pip install --force-reinstall --no-deps {source}"
