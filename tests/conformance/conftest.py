"""What users have, against what a user starts: clients in their own packages, and `prelay serve`.

The text does not matter here, so the model is the null model: its text shows its token ids, and each token follows
from those before it. Nothing leaves this machine, and the keys are no keys.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.servers import own_server, shared_server
from tests.bed.serving import Serving, serving
from tests.bed.tokenizer import make_tokenizer

__all__ = ["own_server", "shared_server"]


@pytest.fixture(scope="session")
def null_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose text shows its token ids."""
    return make_tokenizer(tmp_path_factory.mktemp("null"))


@pytest.fixture(scope="session")
def server(null_folder: Path) -> Iterator[Serving]:
    """`prelay serve` with the null model, which it serves as "null"."""
    with serving("--null-model", "--served-model-name", "null", model=null_folder) as found:
        yield found


def need(package: str) -> None:
    """Skip the test where a client is not installed; in CI, which installs them all, fail."""
    if importlib.util.find_spec(package) is not None:
        return
    words = f"{package} is not installed here: it is of the dependency group `clients` (make clients)"
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)


def client_environment(**more: str) -> dict[str, str]:
    """The environment of a client's own process, without settings and keys of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LITELLM_", "LLM_"))}
    return kept | more
