"""Fixtures and parameters that nki-library's own tests ask for."""

from __future__ import annotations

import random
import re

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
    """Their ranged tests and their `coverage_parametrize`, by their own generators."""
    if "range_test_options" in metafunc.fixturenames:
        from test.utils.ranged_test_harness import RangeTestHarness

        random.seed(metafunc.definition.nodeid)
        limit = getattr(metafunc.function, "limit_num_of_test", None)
        ids, cases = RangeTestHarness(metafunc.function.range_test_config, limit).get_unique_test_cases()
        metafunc.parametrize("range_test_options", cases, ids=ids)
    for mark in metafunc.definition.iter_markers("coverage_parametrize"):
        from test.utils.coverage_parametrized_tests import extract_parametrize_args, generate_parametrized_test_case

        options = dict(mark.kwargs)
        choices = {name: options.pop(name) for name in list(options) if name in metafunc.fixturenames}
        random.seed(metafunc.definition.nodeid)  # it shuffles, and all processes must collect the same cases
        coverage, keep = options.pop("coverage", "singles"), options.pop("filter", None)
        cases = generate_parametrized_test_case(choices, coverage, keep, **options)
        names, values, ids = extract_parametrize_args(choices, cases)
        metafunc.parametrize(names, values, ids=ids)


def pytest_collection_modifyitems(items):
    """Of a family with `cases`, those whose names it matches."""
    items[:] = [item for item in items if re.search(getattr(item.cls or item.function, "cases", ""), item.name)]


@pytest.fixture(autouse=True)
def trn2_is_among_its_platforms(request):
    """Their `platforms` mark."""
    for mark in request.node.iter_markers("platforms"):
        if any(platform.value == "trn2" for platform in mark.kwargs["exclude"]):
            pytest.skip("not for trn2, its own mark says")


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
