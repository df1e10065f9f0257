"""Some of the scenarios of checkpoints for a launch with Horovod."""

import state_scenarios as common


def scenario_a_resumed_run_is_the_unbroken_one():
    for codec in ("onebit", "powersgd:2"):
        common.resume(codec, common.adamw, accumulate=2)


def scenario_rank_zero_saves_for_all():
    common.scenario_rank_zero_saves_for_all()


def scenario_only_rank_zero_loads_and_broadcasts():
    common.scenario_only_rank_zero_loads_and_broadcasts()


def scenario_another_number_of_ranks():
    common.scenario_another_number_of_ranks()
