from collections.abc import Iterator

import pytest

from tests.elastic.job import Template


@pytest.fixture(scope="package")
def template() -> Iterator[Template]:
    """The process that members are forked from."""
    made = Template()
    yield made
    made.close()
