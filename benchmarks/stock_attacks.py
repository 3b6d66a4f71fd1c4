"""Which attacks of tests/attacks a stock grader is given, and why the others are not.

The list is of names, so that an attack which somebody adds is not run before somebody has looked
at it.
"""

from __future__ import annotations

# What the reader of the table is told instead of a number.
NO_SUCH_THING = "no such thing"
NOT_RUN = "not run on a grader without a box"

# About thirty of all kinds, those that tell most first.
SAMPLE = (
    "hooks/ast_transformer",
    "metadata/skip_execution_tags",
    "hooks/judge_replaced",
    "searching/frames",
    "stealing/other_students",
    "files/symbolic_link",
    "hooks/run_code",
    "hooks/custom_exceptions",
    "searching/history",
    "importing/the_library",
    "patching/comparisons",
    "stealing/gradebook",
    "metadata/exit_at_the_top",
    "metadata/checks_doubled",
    "emulated/charges_ahead",
    "shadowing/modules_beside",
    "hooks/check_rebound",
    "kernel/forged_output",
    "lingering/daemon",
    "patching/lying_values",
    "shadowing/ipython_startup",
    "searching/disk",
    "metadata/own_kernel",
    "files/empty",
    "patching/torch_functions",
    "hooks/kernel_methods",
    "seeds/global_generators",
    "signals/alarms",
    "pickles/script_saves_objects",
    "alone/ddp",
    "metadata/checks_deleted",
    "bombs/disk",
    "network/outside",
    "messages/forged_verdict",
)

# Attacks that only `--all` adds.
_MORE = (
    "alone/setup",
    "alone/through_files",
    "alone/training",
    "emulated/alone_in_a_group",
    "emulated/charges_skipped",
    "emulated/early_dummies",
    "emulated/factors_reused",
    "emulated/half_precision",
    "emulated/no_waits",
    "emulated/own_compute",
    "emulated/waits_for_what_it_has_not_sent",
    "files/archive",
    "files/array",
    "files/cells_of_odd_types",
    "files/fifo",
    "files/folder",
    "files/format_that_lies",
    "files/long_cell",
    "files/long_number",
    "files/odd_text",
    "files/other_formats",
    "files/parts_that_are_none",
    "files/pickle",
    "files/second_list_of_cells",
    "files/too_deep",
    "files/utf_16",
    "hooks/cell_events",
    "hooks/display_hook",
    "hooks/input_transformer",
    "hooks/observe_replaced",
    "importing/compiled_leftovers",
    "importing/the_oracle",
    "importing/zoo_and_solutions",
    "kernel/asks_for_input",
    "kernel/deep_output",
    "kernel/forged_replies",
    "kernel/frames_no_client_reads",
    "kernel/line_to_the_front",
    "kernel/number_that_is_none",
    "kernel/numbers_of_cells",
    "kernel/output_that_is_no_json",
    "kernel/reply_that_cannot_be_sent",
    "kernel/reply_that_is_too_deep",
    "kernel/restart_with_five",
    "kernel/source_too_deep",
    "kernel/text_that_no_file_holds",
    "lingering/background_processes",
    "metadata/check_before_its_work",
    "metadata/checks_as_solutions",
    "metadata/checks_as_text",
    "metadata/exit_in_solutions",
    "metadata/outputs_of_full_marks",
    "metadata/points_of_its_own",
    "output/formulas",
    "output/own_tracebacks",
    "output/script_in_html",
    "output/script_in_markdown",
    "output/terminal_sequences",
    "patching/clocks",
    "patching/numpy_conversion",
    "pickles/collectives_of_objects",
    "searching/garbage_collector",
    "searching/open_files",
    "searching/own_gradients",
    "searching/proc",
    "shadowing/environment",
    "shadowing/startup_that_ends_ranks",
    "signals/segfault",
    "stealing/leaves_for_the_next",
)
ALLOWED = frozenset(
    name for name in (*SAMPLE, *_MORE) if not name.startswith(("bombs/", "network/", "messages/"))
)

_ELSEWHERE = {
    "messages": "it speaks to the referee's socket",
    "emulated/calls_on_no_stream": "it speaks to the referee's broker",
    "emulated/fetches_what_it_has_sent": "it speaks to the referee's broker",
    "emulated/frames_of_other_sessions": "it speaks to the referee's broker",
    "hooks/verdict_shown": "it forges the referee's reply",
    "kernel/crowd_at_the_door": "it crowds the sockets of our kernel",
    "lingering/answering_thread": "it answers the referee",
    "metadata/metadata_of_the_grader": "it writes metadata of our intake",
    "searching/socket_folder": "it changes the referee's socket",
    "seeds/practice_seeds": "there is no practice referee",
    "stealing/course_key": "there is no course key",
    "stealing/journal": "there is no journal",
}
_HARMFUL = {
    "bombs": "it uses up memory, disk, processes or time",
    "network": "it reaches for the network",
    "signals/kill_all": "it signals every process that it may",
    "signals/stop_all": "it signals every process that it may",
    "emulated/very_many_calls": "judging it takes hours",
    "files/too_big": "it uses up memory",
    "files/too_many_cells": "it takes very long",
    "files/too_many_parts": "it uses up memory",
    "lingering/tmp_without_rights": "it takes everybody's rights from /tmp",
    "pickles/script_saves_a_bomb": "it asks for a terabyte of memory",
    "shadowing/installed_files": "it writes into what is installed",
    "shadowing/site_files": "it writes into what is installed",
}
# Groups whose attacks leave something outside of their own process, so that the class may suffer
# later: after them a classmate is graded too.
OUTLIVES = frozenset({"files", "lingering", "metadata", "shadowing", "signals", "stealing"})


def why_not(title: str) -> str:
    """Empty if a stock grader may be given the attack, else the reason, as the table prints it."""
    group = title.partition("/")[0]
    for reasons, head in ((_ELSEWHERE, NO_SUCH_THING), (_HARMFUL, NOT_RUN)):
        reason = reasons.get(title) or reasons.get(group)
        if reason:
            return f"{head}: {reason}"
    return "" if title in ALLOWED else f"{NOT_RUN}: nobody has looked at it yet"
