"""Some of the scenarios of saved Keras models in TensorFlow's traced steps."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import state_keras_scenarios as common


def scenario_the_end_of_the_data_takes_nothing_from_what_is_kept():
    common.scenario_the_end_of_the_data_takes_nothing_from_what_is_kept()


def scenario_a_resumed_run_is_the_unbroken_one():
    common.resume("randomk:0.05", window=2, ending=".h5")  # the optimizer is built in a traced step


def scenario_rank_zero_saves_for_all():
    common.save_on_rank_zero(common.LSO, ".keras")


def scenario_residuals_are_in_the_unit_of_true_gradients():
    common.scale("onebit", where=("around",))
