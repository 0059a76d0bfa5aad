"""NxDI's EAGLE models: chains and token trees, greedy and sampled, with and without this library."""

import pytest

from tests.nxdi import harness
from tests.nxdi.statistics import sample_and_compare

NUM_TOKENS = 30
TREES = {
    "balanced": {"0": ["1", "2"], "1": ["3", "4"], "2": ["5", "6"]},
    "one deep leaf": {"0": ["1", "2"], "2": ["3"], "3": ["4"]},
    "a leaf before a parent": {"0": ["1", "2", "3"], "1": ["4"], "3": ["5"]},
}
SMALL = {"vocab_size": 3}  # a head with random weights is right often enough to walk every branch


def classes():
    from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel

    from draft_verify import nxdi

    return NeuronFusedSpecModel, nxdi.apply(NeuronFusedSpecModel)


def prompts_for(batch):
    return [[token % 3 for token in prompt] for prompt in harness.prompts_for(batch)]


def build(fused_cls, batch, tree=None, speculation_length=4, **options):
    if tree is not None:
        options["token_tree_config"] = TREES[tree]
        speculation_length = 1 + sum(map(len, TREES[tree].values()))
    return harness.fused_model(
        fused_cls,
        batch=batch,
        speculation_length=speculation_length,
        eagle=True,
        sizes=SMALL,
        seq_len=128,
        disable_kv_cache_tiling=True,
        **options,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_tokens_are_the_targets_own(batch, tree, transposed):
    prompts = prompts_for(batch)
    model = build(classes()[1], batch, tree, k_cache_transposed=transposed)
    tokens, steps = harness.Decoder(model).generate(prompts, NUM_TOKENS)
    assert tokens == harness.greedy_recompute(model.target_model, prompts, NUM_TOKENS)
    assert min(steps) < NUM_TOKENS - 1  # some drafts were accepted


def test_a_stock_tree_of_unequal_depths_goes_wrong_where_ours_does_not():
    model = build(classes()[0], 4, "a leaf before a parent")
    tokens, _ = harness.Decoder(model).generate(prompts_for(4), NUM_TOKENS)
    assert tokens != harness.greedy_recompute(model.target_model, prompts_for(4), NUM_TOKENS)


@pytest.mark.parametrize("tree", [None, "a leaf before a parent"])
def test_sampled_drafts_follow_the_targets_law(tree):
    model = build(classes()[1], 64, tree, do_sample=True)
    accepted = sample_and_compare(model, [1, 0, 2], [3.0, 1.0, 0.8], rounds=8)
    assert accepted > 8 * 64 * 0.3
