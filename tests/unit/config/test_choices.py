"""Optimizers by name: what follows from one, and names of classes of another package."""

import pytest

from megatron.optimus.config.choices import OptimizerName


def test_what_follows_from_a_name() -> None:
    matrices = {name for name in OptimizerName if name.is_for_matrices}
    assert {name.value for name in matrices} == {"muon", "normuon", "soap", "shampoo", "galore", "dion"}
    assert {name.value for name in matrices if name.keeps_flat_states} == {"muon", "normuon"}
    free = {name.value for name in OptimizerName if name.is_schedule_free}
    assert free == {"schedule-free-adamw", "schedule-free-sgd"}
    assert (OptimizerName.ADEMAMIX.num_states, OptimizerName("sgd")) == (3, OptimizerName.SGD)


def test_a_class_of_the_other_package_is_one_member_made_when_asked_for() -> None:
    lion = OptimizerName("pytorch_optimizer:Lion")
    assert lion is OptimizerName("pytorch_optimizer:Lion") and lion.is_of_library and not lion.is_for_matrices
    assert (lion.value, lion.num_states) == ("pytorch_optimizer:Lion", 2)
    assert lion not in list(OptimizerName) and not OptimizerName.LION.is_of_library
    for word in ("Lion", "pytorch_optimizer:", "pytorch_optimizer:a.b", "pytorch_optimizer:Li on", 3):
        with pytest.raises(ValueError, match="is not a valid OptimizerName"):
            OptimizerName(word)
