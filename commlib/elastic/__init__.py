"""Groups whose ranks come and go: members, numbered views of them, and the service that numbers the views."""

from commlib.elastic.members import Members, join
from commlib.elastic.sampler import Loader, Sampler
from commlib.errors import Excluded, StoreLost

__all__ = ["Excluded", "Loader", "Members", "Sampler", "StoreLost", "join"]
