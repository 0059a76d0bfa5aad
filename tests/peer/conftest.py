"""Fixtures and parameters that nki-library's own tests ask for."""

from __future__ import annotations

import random

import pytest

from draft_verify.reference import emulator

from . import standins


@pytest.fixture(autouse=True)
def notes_are_no_errors():
    """Other people's kernels may do what is legal and risky."""
    emulator.set_strict(False)
    yield
    emulator.set_strict(True)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnknownMarkWarning")


def pytest_generate_tests(metafunc):
    """Their `coverage_parametrize`, by their own generator."""
    for mark in metafunc.definition.iter_markers("coverage_parametrize"):
        from test.utils.coverage_parametrized_tests import extract_parametrize_args, generate_parametrized_test_case

        options = dict(mark.kwargs)
        choices = {name: options.pop(name) for name in list(options) if name in metafunc.fixturenames}
        random.seed(metafunc.definition.nodeid)  # it shuffles, and all processes must collect the same cases
        coverage, keep = options.pop("coverage", "singles"), options.pop("filter", None)
        cases = generate_parametrized_test_case(choices, coverage, keep, **options)
        names, values, ids = extract_parametrize_args(choices, cases)
        metafunc.parametrize(names, values, ids=ids)


@pytest.fixture
def test_manager():
    return standins.Orchestrator()


@pytest.fixture
def platform_target():
    from test.utils.common_dataclasses import Platforms

    return Platforms.TRN2


@pytest.fixture
def collector():
    return standins.NoCollector()
