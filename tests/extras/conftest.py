"""Fixtures of several folders: models, their answers and a trained head, each of which is made once for all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _few_measured_steps():
    """Time three steps for each number of rows that drafts may have, not steps of a tenth of a second."""
    from nanovllm_extras.speculation import start_speculation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_speculation, "MIN_SECONDS", 0)
        yield


@pytest.fixture(scope="session")
def all_hybrids(tmp_path_factory):
    """Models with recurrent states, by the names of their kinds."""
    from tests.extras.models.hybrid_checkpoints import FIELDS, HybridCheckpoints

    pytest.importorskip("transformers.models.qwen3_5_moe")
    return {kind: HybridCheckpoints(tmp_path_factory.mktemp(kind), kind) for kind in FIELDS}


@pytest.fixture(scope="session")
def grouped(tmp_path_factory):
    """Models whose layers form groups."""
    from tests.extras.kv_groups.test_grouped_layers import GroupedCheckpoints

    return GroupedCheckpoints(tmp_path_factory.mktemp("grouped"))


@pytest.fixture(scope="session")
def heads(all_hybrids, tmp_path_factory):
    """Models with a head for multi-token prediction, which is trained on their answers."""
    from tests.extras.speculation.test_mtp import Heads

    return Heads(tmp_path_factory.mktemp("mtp"), hybrids=all_hybrids["Qwen3_5"])
