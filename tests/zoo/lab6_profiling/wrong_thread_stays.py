"""Leaves its thread behind, waiting for room in a queue that nobody reads.

loses: prof_prefetch_ends
says: prof_prefetch_ends it waits in put() for room in the queue that nobody will make
"""


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    ready = queue.Queue(maxsize=depth)

    def fill():
        try:
            for batch in batches:
                ready.put(("batch", batch))
            ready.put(("end", None))
        except Exception as error:
            ready.put(("error", error))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        what, thing = ready.get()
        if what == "end":
            return
        if what == "error":
            raise thing
        yield thing
