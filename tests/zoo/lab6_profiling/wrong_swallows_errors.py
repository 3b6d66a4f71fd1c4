"""Takes an error of the source for its end.

loses: prof_prefetch_ends
"""


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    ready = queue.Queue(maxsize=depth)
    end, stopped = object(), threading.Event()

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
        except Exception:
            put((end, None))

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
