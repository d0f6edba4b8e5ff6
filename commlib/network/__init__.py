"""Networks, devices and models as data: presets, and models profiled on this machine."""

from commlib.network.profiling import profile_model

__all__ = ["profile_model"]
