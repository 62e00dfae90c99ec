import pytest

from megatron_spd.errors import PlanError
from megatron_spd.stage_plan import Roles, StagePlan


def test_uneven_bounds_answer_every_question() -> None:
    plan = StagePlan.from_bounds((0, 2, 5, 7), taps=(0, 2, 3, 7))
    assert [list(plan.layers_of(s)) for s in range(3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [plan.stage_of_layer(i) for i in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [plan.taps_of(s) for s in range(3)] == [(2,), (3,), (7,)]
    assert [plan.taps_known_at(d) for d in range(4)] == [(0,), (0, 2), (0, 2, 3), (0, 2, 3, 7)]
    assert plan.megatron_layout() == "Ett|ttt|ttL"


def test_types_that_no_depth_reaches_do_not_exist() -> None:
    plan = StagePlan.from_bounds((0, 3, 6), taps=(0, 1, 2, 3))
    assert [plan.type_of(d) for d in range(3)] == [0, 1, 1]
    assert plan.num_types == 2


def test_even_spreads_the_remainder_over_the_first_stages() -> None:
    assert StagePlan.even(7, 3).bounds == (0, 3, 5, 7)
    assert StagePlan.even(30, 4).num_layers == 30


@pytest.mark.parametrize(("own", "world"), [(False, 3), (True, 4)])
def test_module_rank_beside_a_stage_or_alone(own: bool, world: int) -> None:
    plan = StagePlan.even(6, 3, module_own_rank=own)
    assert plan.world_size == world
    assert plan.roles_of(1) == Roles(stage=1, module=False)
    assert plan.roles_of(plan.module_rank).module
    with pytest.raises(PlanError, match="rank 9"):
        plan.roles_of(9)


def test_json_round_trip_keeps_the_fingerprint() -> None:
    plan = StagePlan.from_bounds((0, 9, 18, 27, 36), taps=(0, 9, 36))
    again = StagePlan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert again.fingerprint != StagePlan.even(36, 4).fingerprint


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(PlanError) as caught:
        StagePlan(bounds=(0, 3, 3), taps=(1, 9), stage_ranks=(0, 0), module_rank=5)
    text = str(caught.value)
    assert text.count("\n- ") == 4
    assert "(0, 3, 3)" in text and "reach past the last boundary 3" in text


def test_more_stages_than_layers_is_refused_with_both_values() -> None:
    with pytest.raises(PlanError, match="5 layers cannot fill 6 stages"):
        StagePlan.even(5, 6)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(PlanError, match="not a stage plan"):
        StagePlan.from_json('{"bounds": [0, 1], "layers": 3}')
