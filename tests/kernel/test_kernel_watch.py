"""A cell in which ranks do different things for long says who is where, once."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest
from kernel_helper import kernel_for_diagnose

from minidist.kernel.hang import Place
from minidist.kernel.inside import diagnose
from minidist.kernel.watch import TELL_AFTER_S, Watch

WAITS = Place("waiting", op="barrier", at="Cell In[2], line 1: dist.barrier()", mark=1)
LOOPS = Place("running", at="Cell In[2], line 3: while True: pass", mark=2)


@pytest.fixture
def watch():
    said = []
    cell = SimpleNamespace(unfinished=[0, 1], outputs=SimpleNamespace(tell=said.append))
    made = Watch(cell, SimpleNamespace(), None)
    made.said, made.cell = said, cell
    return made


def look(watch, places, *, after_s):
    watch._tell_of_ranks_apart(watch._start + after_s, places)


def test_who_is_where_is_told_once(watch):
    places = {0: WAITS, 1: LOOPS}
    look(watch, places, after_s=1)
    look(watch, places, after_s=TELL_AFTER_S)
    assert watch.said == []
    for after_s in (TELL_AFTER_S + 1, TELL_AFTER_S + 20):
        look(watch, places, after_s=after_s)
    assert watch.said == [
        "after 11 s",
        "rank 0: waits in barrier at Cell In[2], line 1: dist.barrier()",
        "rank 1: is running at Cell In[2], line 3: while True: pass",
    ]


def test_ranks_that_do_the_same_are_left_alone(watch):
    for after_s in (0, TELL_AFTER_S + 1):
        look(watch, {0: LOOPS, 1: LOOPS}, after_s=after_s)
    assert watch.said == []


def test_ranks_that_move_are_left_alone(watch):
    for step in range(20):
        places = {rank: Place("running", at=f"line {step} of {rank}", mark=step) for rank in (0, 1)}
        look(watch, places, after_s=step)
    assert watch.said == []


def test_a_rank_that_has_finished_is_told_with_one_that_has_not(watch):
    watch.cell.unfinished = [1]
    for after_s in (0, TELL_AFTER_S):
        look(watch, {0: Place("finished"), 1: LOOPS}, after_s=after_s)
    assert watch.said[1] == "rank 0: finished the cell after 0 collectives"


def test_a_function_of_a_library_is_named_by_what_the_cell_calls():
    """Not by the line of the library's own file in which it waits."""
    compiler = SimpleNamespace(format_code_name=lambda name: ("Cell", "In[2]") * (name == __file__))
    asked, go = queue.Queue(), queue.Queue()
    thread = threading.Thread(target=lambda: asked.put(go.get()), daemon=True)
    thread.start()
    while "wait" not in {frame.f_code.co_name for frame in diagnose._stack(thread)}:
        time.sleep(0.01)
    assert diagnose._called(diagnose._stack(thread), compiler) == "get()"
    kernel = kernel_for_diagnose(executing=False)
    while not (doing := diagnose.where(thread, kernel).get("doing")):  # until it sleeps
        time.sleep(0.01)
    assert doing == "has not begun the cell"
    go.put(None)
    thread.join(10)
