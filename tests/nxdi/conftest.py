"""`make test-nxdi NXDI=<folder with checkouts of neuronx-distributed-inference and neuronx-distributed>`."""

import logging
import os

import pytest


def pytest_configure(config):
    """Who asks for this folder by name is told what it needs."""
    asked_for = any("tests/nxdi" in str(argument) for argument in config.invocation_params.args)
    if asked_for and not os.environ.get("NXDI"):
        raise pytest.UsageError(
            "NXDI is not set: name a folder with checkouts of neuronx-distributed-inference and neuronx-distributed"
        )


def pytest_ignore_collect(collection_path):
    """In a run of all tests without checkouts there is nothing to import."""
    if not os.environ.get("NXDI") and collection_path.name.startswith("test_"):
        return True
    return None


@pytest.fixture(scope="session", autouse=True)
def nxdi_on_cpu():
    import torch

    from tests.nxdi import harness

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    harness.install(os.environ["NXDI"])
