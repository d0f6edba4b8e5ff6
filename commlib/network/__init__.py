"""Networks, devices and models as data: known ones, and those that were measured here."""

from commlib.network.profiling import profile_model

__all__ = ["profile_model"]
