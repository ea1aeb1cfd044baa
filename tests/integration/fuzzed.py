"""What the fuzz tests are aimed at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.processes import Api, fleet, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import make_tokenizer
from tests.integration.leftovers import check_no_job_left

#: A context so short that a request which is right by chance is answered at once.
CONTEXT = 48


@pytest.fixture(scope="module")
def target(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A fleet that answers in milliseconds. At its end no job is left."""
    queue = shared_server.settings()
    with fleet(queue, make_tokenizer(tmp_path_factory.mktemp("short"), CONTEXT)) as found:
        api = found.api(files_dir=tmp_path_factory.mktemp("kept"))
        found.worker(Role.UNIFIED, null=NullModel(step_ms=0))
        until_ready(api.url)
        yield api
        check_no_job_left(queue)
        assert "Traceback" not in api.log, api.log[-4000:]
