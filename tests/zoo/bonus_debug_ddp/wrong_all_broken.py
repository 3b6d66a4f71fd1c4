"""Hands the broken programs in as they are.

loses: everything
class: example
"""

# %% replaces="mend_1"
train = broken_train


# %% replaces="mend_2"
train_step = broken_step


# %% replaces="mend_3"
reduce_in_buckets = broken_reduce


# %% replaces="mend_4"
accumulate = broken_accumulate


# %% replaces="mend_5"
amp_step = broken_amp_step


# %% replaces="mend_6"
broadcast_model = broken_broadcast


# %% replaces="mend_7"
evaluate = broken_evaluate


# %% replaces="mend_8"
save_checkpoint = broken_save
load_checkpoint = broken_load


# %% replaces="mend_9"
prepare_once = broken_prepare


# %% replaces="mend_10"
reduce_metrics = broken_metrics


# %% replaces="mend_11"
build_model = broken_build
