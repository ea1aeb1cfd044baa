"""One folder of files is for one queue: with two, each batch would be run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from prelay_queue.settings import QueueSettings
from tests.bed import http
from tests.bed.processes import fleet
from tests.bed.servers import Server

pytestmark = pytest.mark.timeout(120)


def other(settings: QueueSettings) -> QueueSettings:
    """The same fleet on another Redis: here another database of the same server."""
    return QueueSettings(f"{settings.url}?db=7", settings.fleet)


@pytest.mark.slow
def test_processes_of_another_queue_refuse_a_folder_that_is_used_and_may_have_it_later(
    own_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    settings = own_server.settings()
    with fleet(settings, null_folder) as ours, fleet(other(settings), null_folder) as theirs:
        first = ours.api(files_dir=tmp_path)
        ours.api(files_dir=tmp_path)
        ours.batch_worker(tmp_path)
        with pytest.raises(AssertionError, match=f"prelay api: files_dir {tmp_path} is used by API process"):
            theirs.api(files_dir=tmp_path)
        with pytest.raises(AssertionError, match=f"prelay batch-worker: files_dir {tmp_path} is used by API process"):
            theirs.batch_worker(tmp_path)
        assert [process.code for process in theirs.processes] == [1, 1]
        assert http.get(f"{first.url}/v1/batches").status_code == 200
        for process in ours.processes:
            assert process.stop() == 0
        assert list((tmp_path / "users").iterdir()) == []
        assert http.get(f"{theirs.api(files_dir=tmp_path).url}/v1/batches").status_code == 200


def test_a_redis_that_lost_its_data_is_the_same_queue(own_server: Server, null_folder: Path, tmp_path: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        first = found.api(files_dir=tmp_path)
        own_server.client.flushall()
        second = found.api(files_dir=tmp_path)
        assert {http.get(f"{api.url}/v1/batches").status_code for api in (first, second)} == {200}


def test_a_killed_api_process_does_not_keep_its_folder(own_server: Server, null_folder: Path, tmp_path: Path) -> None:
    settings = own_server.settings()
    with fleet(settings, null_folder) as ours, fleet(other(settings), null_folder) as theirs:
        ours.api(files_dir=tmp_path).kill()
        theirs.api(files_dir=tmp_path)
