"""What stays unsharded between micro-batches is decided once, by the plan."""

import pytest

from shardtune.training.states.reshard import KeptBytes, ReshardPolicy, decide


@pytest.mark.parametrize(
    ("free", "most_groups", "groups"),
    [
        (100, 4, 4),  # half of it is room for all
        (100, 2, 2),
        (100, None, 4),  # before a simulated step, all or none
        (98, None, 0),
        (98, 0, 0),
        (98, 2, 2),
        (98, 4, 3),
        (58, 4, 2),
        (38, 4, 1),
        (18, 4, 0),
    ],
)
def test_as_many_groups_stay_gathered_as_have_room(free, most_groups, groups):
    kept = KeptBytes(parameters=[10, 10, 10, 20], gradients=1000, sums=0)
    policy, _ = decide(kept, free, micro_batches=2, most_groups=most_groups)
    assert policy == ReshardPolicy(groups, keep_gradients=False, keep_sums=True)
