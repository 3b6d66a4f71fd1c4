"""Marks the end of the batches with None, which is a batch, too.

loses: prof_prefetch_ends
"""


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    ready = queue.Queue(maxsize=depth)
    end, stopped = None, threading.Event()

    def put(item):
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.05)
            except queue.Full:
                pass
        raise GeneratorExit

    def fill():
        try:
            for batch in batches:
                put((batch, None))
            put((end, None))
        except GeneratorExit:
            pass
        except Exception as error:
            put((end, error))

    threading.Thread(target=fill, daemon=True).start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is end:
                return
            yield batch
    finally:
        stopped.set()
