"""Some of the Keras scenarios for a launch without Horovod, where TensorFlow's graphs call mpi4py."""

import keras_scenarios as common


def scenario_stats_count_steps_not_traces():
    common.scenario_stats_count_steps_not_traces()


def scenario_custom_loops():
    common.scenario_custom_loops()


def scenario_loss_scale_in_every_order():
    common.scenario_loss_scale_in_every_order()


def scenario_uneven_data_with_callbacks():
    common.scenario_uneven_data_with_callbacks()


def scenario_collectives():
    common.scenario_collectives()
