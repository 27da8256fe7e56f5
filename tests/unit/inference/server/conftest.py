"""A server of a small model with a template for chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.inference.server.served import Served

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.unit.inference.server.served import serving, small_model  # needs fastapi

    folder = tmp_path_factory.mktemp("served")
    (folder / "template.jinja").write_text(TEMPLATE)
    with serving(small_model(folder)[0], template=folder / "template.jinja") as found:
        yield found
